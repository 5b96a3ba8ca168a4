"""G4: what goes to the tiers of a node, what that costs the save when it fails, and when it goes again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.format import layout
from resilient.format.digest import BytesLike
from resilient.format.documents import Object
from resilient.format.layout import Attempt
from resilient.format.receipts import decode_receipt
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.throttled import UNBOUNDED
from resilient.writer.copying import Receiving, Sending
from resilient.writer.in_thread import ThreadWriter
from resilient.writer.messages import Address, Committed, Copied, Save, Tier, Tiered
from resilient.writer.persisting import Persister
from resilient.writer.presence import TIERING, in_flight
from resilient.writer.process import ProcessWriter
from resilient.writer.slot import Slot
from resilient.writer.tiering import open_tier
from tests.catalog.runs import new_generation
from tests.writer.staging import Trainer, is_step, opened, state


def tier(path: Path, name: str = "memory") -> Tier:
    return Tier(name=name, path=str(path))


def begin(store: MemoryStore, *tiers: Tier, slots: int = 2, **settings: Any) -> Trainer:
    claim = new_generation(store)
    trainer = Trainer(claim, slots=[Slot.create(f"test-{number}") for number in range(slots)])
    first = opened(store, claim, tiers=tiers, **settings)
    trainer.has(lambda heard: ThreadWriter(store, first, trainer.slots, heard))
    return trainer


def order(trainer: Trainer, step: int, *, stores: bool, complete: int | None = None, slot: int = 0) -> Save:
    staged = trainer.staged(step, state(step), slot=slot)
    ordered = msgspec.structs.replace(staged, stores=stores, tiers=True, complete=complete)
    trainer.order(ordered)
    return ordered


def near(path: Path) -> list[int]:
    """Return the steps that a tier holds receipts of."""
    parsed = [layout.parse_attempt(key) for key in LocalStore(path).list("steps/")]
    return sorted(each[0].step for each in parsed if each is not None)


def close(trainer: Trainer) -> None:
    assert trainer.link is not None
    assert trainer.link.close(30)


def test_a_tier_holds_what_the_store_holds_under_the_same_names(tmp_path: Path) -> None:
    store, here = MemoryStore(), LocalStore(tmp_path / "tier")
    trainer = begin(store, tier(tmp_path / "tier"))
    order(trainer, 1, stores=True)
    assert isinstance(trainer.outcome(1), Committed)
    tiered = trainer.wait(Tiered, 1)
    assert (tiered.written, tiered.faults) == (("memory",), ())
    is_step(store, 1, state(1))
    data = list(here.list("data/"))
    assert data
    assert sorted(data) == sorted(store.list("data/"))
    assert all(here.get(key) == store.get(key) for key in data)
    close(trainer)


def test_what_the_store_holds_in_another_form_has_another_name(tmp_path: Path) -> None:
    store, here = MemoryStore(), LocalStore(tmp_path / "tier")
    trainer = begin(store, tier(tmp_path / "tier"), compress="zstd:1")
    staged = trainer.staged(1, {"even": np.zeros(1 << 18)})
    trainer.order(msgspec.structs.replace(staged, tiers=True))
    assert isinstance(trainer.outcome(1), Committed)
    trainer.wait(Tiered, 1)
    is_step(store, 1, {"even": np.zeros(1 << 18)})
    assert set(here.list("data/")).isdisjoint(store.list("data/")), "no two contents under one name"
    close(trainer)


def test_a_tier_that_fails_is_told_and_costs_neither_the_save_nor_the_other_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    store = MemoryStore()
    trainer = begin(store, tier(tmp_path / "file", "/broken"), tier(tmp_path / "tier"))
    order(trainer, 1, stores=True)
    assert isinstance(trainer.outcome(1), Committed)
    tiered = trainer.wait(Tiered, 1)
    assert tiered.written == ("memory",)
    (fault,) = tiered.faults
    assert fault.startswith("/broken: ")
    close(trainer)


def test_an_older_state_stays_until_a_newer_one_is_complete_on_all_ranks(tmp_path: Path) -> None:
    trainer = begin(MemoryStore(), tier(tmp_path))
    for step, complete, left in [(1, None, [1]), (2, None, [1, 2]), (3, 2, [2, 3]), (4, 3, [3, 4]), (5, 3, [3, 5])]:
        order(trainer, step, stores=False, complete=complete)
        trainer.wait(Tiered, step)
        assert near(tmp_path) == left, f"while step {complete} is known to be complete"
    data = {found.step for key in LocalStore(tmp_path).list("data/") if (found := layout.parse_data(key)) is not None}
    assert data == {3, 5}, "there is room for two"
    close(trainer)


def test_the_states_of_the_life_before_stay_until_one_of_this_life_is_complete(tmp_path: Path) -> None:
    store = MemoryStore()
    before = begin(store, tier(tmp_path))
    order(before, 7, stores=False)
    before.wait(Tiered, 7)
    close(before)
    trainer = begin(store, tier(tmp_path))
    order(trainer, 5, stores=False)
    trainer.wait(Tiered, 5)
    assert near(tmp_path) == [5, 7]
    order(trainer, 6, stores=False, complete=5)
    trainer.wait(Tiered, 6)
    assert near(tmp_path) == [5, 6]
    close(trainer)


def test_a_step_that_goes_to_the_tiers_twice_is_what_it_was_the_second_time(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = begin(store, tier(tmp_path))
    order(trainer, 1, stores=False)
    trainer.wait(Tiered, 1)
    trainer.answers.clear()
    trainer.order(msgspec.structs.replace(trainer.staged(1, state(2)), tiers=True))
    trainer.wait(Tiered, 1)
    assert isinstance(trainer.outcome(1), Committed)
    here = LocalStore(tmp_path)
    assert all(here.get(key) == store.get(key) for key in here.list("data/"))
    close(trainer)


class Slow(MemoryStore):
    """A store whose puts wait."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = threading.Event()

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        assert self.goes.wait(60)
        super().put(key, parts)


def test_states_go_to_the_tiers_while_a_save_waits_for_its_store(tmp_path: Path) -> None:
    store = Slow()
    trainer = begin(store, tier(tmp_path))
    order(trainer, 1, stores=True, slot=0)
    trainer.wait(Tiered, 1)
    for step in (2, 3):
        order(trainer, step, stores=False, slot=1)
        trainer.wait(Tiered, step)
    assert not any(isinstance(each, Committed) for each in trainer.answers)
    store.goes.set()
    assert isinstance(trainer.outcome(1), Committed)
    assert near(tmp_path) == [2, 3] or near(tmp_path) == [1, 2, 3]
    close(trainer)


def test_a_state_that_was_staged_over_is_in_no_tier(tmp_path: Path) -> None:
    trainer = begin(MemoryStore(), tier(tmp_path))
    staged = trainer.staged(1, state(1))
    trainer.slots[0].begin(generation=trainer.claim.generation, step=2)
    trainer.order(msgspec.structs.replace(staged, stores=False, tiers=True))
    tiered = trainer.wait(Tiered, 1)
    assert tiered.written == ()
    assert "staged over" in tiered.faults[0]
    assert near(tmp_path) == []
    close(trainer)


def test_a_writer_process_writes_to_its_tiers_and_says_so_where_others_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = LocalStore(tmp_path / "run")
    trainer = Trainer(new_generation(store))
    first = opened(store, trainer.claim, tiers=(tier(tmp_path / "tier"),), run_id="tiered")
    trainer.has(lambda heard: ProcessWriter(first, trainer.slots, heard))
    # More orders than are done at once: those that wait are seen.
    staged = msgspec.structs.replace(trainer.staged(1, state(1, 32 << 20)), stores=False, tiers=True)
    for _ in range(8):
        trainer.order(staged)
    seen = [each.phase for each in in_flight("tiered")]
    trainer.wait(Tiered, 1)
    close(trainer)
    assert seen in ([], [TIERING]), "it may have been quicker"
    assert near(tmp_path / "tier") == [1]
    assert not list(store.list("data/"))
    assert in_flight("tiered") == ()


# --- copies -----------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, step: int) -> tuple[LocalStore, Attempt]:
    trainer = begin(MemoryStore(), tier(tmp_path / "from"))
    order(trainer, step, stores=False)
    trainer.wait(Tiered, step)
    close(trainer)
    claim = trainer.claim
    return open_tier(tier(tmp_path / "from")), Attempt(step, claim.generation, claim.nonce)


def sent(store: LocalStore, attempt: Attempt, to: Address) -> Copied:
    heard: list[Copied] = []
    come = threading.Event()

    def say(answer: Copied) -> None:
        heard.append(answer)
        come.set()

    Sending(store, say, rank=0, bandwidth=UNBOUNDED, clock=SYSTEM_CLOCK).send(attempt, to)
    assert come.wait(30)
    return heard[0]


@pytest.fixture
def receiving(tmp_path: Path) -> Receiving:
    return Receiving(LocalStore(tmp_path / "to", volatile=True))


def address(receiving: Receiving, token: str | None = None) -> Address:
    return Address(host="127.0.0.1", port=receiving.port, token=token or receiving.token)


def test_a_copy_on_another_node_is_the_same_bytes(tmp_path: Path, receiving: Receiving) -> None:
    store, attempt = written(tmp_path, 3)
    answer = sent(store, attempt, address(receiving))
    assert answer.fault == ""
    assert answer.nbytes == sum(store.size(key) for key in store.list("data/"))
    copy = LocalStore(tmp_path / "to")
    keys = sorted([*store.list("data/"), *store.list("steps/")])
    assert keys == sorted([*copy.list("data/"), *copy.list("steps/")])
    assert all(copy.get(key) == store.get(key) for key in keys)
    receiving.close()


def test_a_copy_that_was_damaged_on_its_way_has_no_receipt(tmp_path: Path, receiving: Receiving) -> None:
    store, attempt = written(tmp_path, 3)
    (key, *_) = store.list("data/")
    content = bytearray(store.get(key))
    content[len(content) // 2] ^= 1
    store.put(key, [content])
    assert "has not taken it" in sent(store, attempt, address(receiving)).fault
    assert not list(LocalStore(tmp_path / "to").list("steps/"))
    receiving.close()


def test_who_does_not_know_the_word_can_leave_nothing(tmp_path: Path, receiving: Receiving) -> None:
    store, attempt = written(tmp_path, 3)
    assert sent(store, attempt, address(receiving, "another")).fault
    assert not (tmp_path / "to").exists()
    receiving.close()


def test_a_node_that_does_not_listen_is_told_of(tmp_path: Path, receiving: Receiving) -> None:
    store, attempt = written(tmp_path, 3)
    receiving.close()
    to = address(receiving)
    assert sent(store, attempt, to).fault.startswith(f"copy to 127.0.0.1:{to.port}: ")


def test_the_receipt_in_a_tier_says_all_that_the_store_would_need(tmp_path: Path) -> None:
    store, attempt = written(tmp_path, 3)
    receipt = decode_receipt(store.get(attempt.receipt(0)), "the receipt")
    assert (receipt.attempt, receipt.rank, receipt.world_size) == (attempt, 0, 1)
    assert {each.key for each in receipt.objects} == set(store.list("data/"))


def test_bandwidth_holds_back_copies(tmp_path: Path, receiving: Receiving) -> None:
    store, attempt = written(tmp_path, 3)
    asked: list[int] = []

    class Counting:
        def wait(self, nbytes: int) -> None:
            asked.append(nbytes)

    come = threading.Event()
    said: Callable[[Copied], None] = lambda _: come.set()
    Sending(store, said, rank=0, bandwidth=Counting(), clock=SYSTEM_CLOCK).send(attempt, address(receiving))  # type: ignore[arg-type]
    assert come.wait(30)
    assert sum(asked) >= sum(store.size(key) for key in store.list("data/"))
    receiving.close()


def test_an_orphan_removes_nothing_that_a_later_life_may_have_committed(tmp_path: Path) -> None:
    for orphaned, left in ((False, 0), (True, 1)):
        store = MemoryStore()
        claim = new_generation(store)
        attempt = Attempt(1, claim.generation, claim.nonce)
        key = attempt.data(0, 0)
        store.put(key, [b"of a later life"])
        first = opened(store, claim, tiers=(tier(tmp_path),))
        persister = Persister(store, first, clock=SYSTEM_CLOCK, orphaned=lambda orphaned=orphaned: orphaned)  # type: ignore[misc]
        persister._withdraw(attempt, [Object(key=key, nbytes=15)])
        assert len(list(store.list("data/"))) == left
        assert not list(store.list("steps/")), "no TOMBSTONE either"


def test_what_is_committed_meanwhile_is_not_withdrawn(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = begin(store, tier(tmp_path))
    order(trainer, 1, stores=True)
    assert isinstance(trainer.outcome(1), Committed)
    close(trainer)
    attempt = Attempt(1, trainer.claim.generation, trainer.claim.nonce)
    keys = list(store.list("data/"))
    persister = Persister(store, opened(store, trainer.claim, tiers=(tier(tmp_path),)), clock=SYSTEM_CLOCK)
    persister._withdraw(attempt, [Object(key=key, nbytes=1) for key in keys])
    assert list(store.list("data/")) == keys
    is_step(store, 1, state(1))
