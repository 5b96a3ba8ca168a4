"""A store that acknowledges before it stores, and loses what was not yet stored when its machine goes down."""

from __future__ import annotations

import pytest
import torch

import resilient
from resilient.engine.peers import Peers
from resilient.engine.restore import restore
from resilient.events import Bus, Event, FellBack
from resilient.store.memory import MemoryStore
from resilient.testing.faulty_store import Fault, FaultyStore, Mode

OF_ATTEMPTS = "*/g0*"  # the objects of saves; not those that say who lives, which are written whenever it is time


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"a": torch.full((64,), float(step)), "b": torch.full((3, 5), float(step))}}


def lost(at: int, times: int | None) -> tuple[MemoryStore, int]:
    """Save steps 1 and 2, the writes of the second from ``at`` on only acknowledged; return what another node finds."""
    store = FaultyStore(MemoryStore())
    resilient.save(store, 1, state(1)).wait(60)
    store.inject(
        Fault(mode=Mode.DROP_UNSYNCED, verbs={"put", "create"}, key=OF_ATTEMPTS, at=at, times=times),
    )
    resilient.save(store, 2, state(2)).wait(60)
    fired = store.fired
    store.crash()
    found = MemoryStore()
    for key in store.inner.list(""):
        found.put(key, [store.inner.get(key)])
    return found, fired


@pytest.mark.field_report("BR-029")
@pytest.mark.parametrize("times", [1, None], ids=["one object", "all from there on"])
def test_the_next_node_continues_from_the_newest_step_that_is_whole(times: int | None) -> None:
    newest = []
    for at in range(1, 100):
        found, fired = lost(at, times)
        into, told = state(0), list[Event]()
        bus = Bus()
        bus.subscribe(told.append)
        outcome = restore(found, into, Peers.current(), resume="auto", strict=True, bus=bus, timeout_s=30)
        assert outcome is not None
        step = outcome.commit.step
        for name, tensor in state(step)["model"].items():
            assert torch.equal(into["model"][name], tensor), f"write {at} of step 2 was lost"
        committed = any(key.endswith("COMMIT") and "000000000002" in key for key in found.list("steps/"))
        assert any(isinstance(event, FellBack) for event in told) == (committed and step == 1), told
        newest.append(step)
        if not fired:
            break
    assert len(newest) >= 4, "data, receipt, manifest, COMMIT"
    assert newest[-1] == 2
    assert newest[0] == 1, "the data of step 2 were lost"
