"""Two launches on one place: the second is refused while the first lives, and a launch that was taken over is over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from resilient.catalog import process
from resilient.catalog.beat import Sign, is_alive, read_sign
from resilient.catalog.launch import Heartbeat, check_no_other_launch
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ConflictError, ErrorKind, StoreError
from resilient.format import layout
from resilient.format.documents import Claim, encode_document
from resilient.format.frame import seal_json
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, new_generation


class WatchedClock(HandClock):
    """Calls ``meanwhile`` whenever somebody sleeps."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self.meanwhile()


def elsewhere(store: MemoryStore, launch: str, *, host: str = "other") -> Claim:
    """Make the newest generation one of another machine."""
    claim = replace(
        new_generation(store, launch=launch, heartbeat=True), host=host, pid=77, process_started="boot/ns/1"
    )
    store.put(layout.claim(claim.generation), [encode_document(claim)])
    return claim


def beat(store: MemoryStore, launch: str, count: int, *, ended: bool = False) -> None:
    sign = Sign(
        host="other",
        pid=77,
        process_started="boot/ns/1",
        interval_s=5.0,
        seen=f"then {count}",
        count=count,
        ended=ended,
    )
    store.put(layout.heartbeat(launch), [seal_json(asdict(sign))])


def check(store: MemoryStore, launch: str = "mine", *, takeover: bool = False, clock: HandClock | None = None) -> float:
    """Check; return how long that took."""
    clock = clock or HandClock()
    check_no_other_launch(store, launch=launch, takeover=takeover, clock=clock)
    return clock.elapsed_s


def test_an_empty_place_and_a_restart_of_the_same_launch_are_free() -> None:
    store = MemoryStore()
    assert check(store) == 0
    new_generation(store, launch="mine", heartbeat=True)
    with Heartbeat(store, "mine"):
        assert check(store) == 0


def test_a_living_process_on_this_machine_refuses_at_once_and_is_named() -> None:
    store = MemoryStore()
    claim = new_generation(store, launch="other", heartbeat=True)
    clock = HandClock()
    with pytest.raises(ConflictError) as caught:
        check(store, clock=clock)
    assert caught.value.kind is ErrorKind.RUN_IN_USE
    assert f"process {claim.pid} on {claim.host}" in str(caught.value)
    assert "takeover=True" in str(caught.value.hint)
    assert clock.elapsed_s == 0
    assert check(store, takeover=True) == 0


def test_a_dead_process_on_this_machine_is_waited_for_not_a_moment() -> None:
    store = MemoryStore()
    claim = new_generation(store, launch="other", heartbeat=True)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        dead = replace(claim, pid=child.pid, process_started=process.started(child.pid))
    store.put(layout.claim(1), [encode_document(dead)])
    assert dead.process_started
    assert check(store) == 0
    reused = replace(claim, process_started=claim.process_started + "0")  # another process has the number now
    store.put(layout.claim(1), [encode_document(reused)])
    assert check(store) == 0


def test_a_launch_elsewhere_whose_heartbeat_moves_refuses() -> None:
    store = MemoryStore()
    elsewhere(store, "theirs")
    beat(store, "theirs", 1)
    clock = WatchedClock(lambda: beat(store, "theirs", 2))
    with pytest.raises(ConflictError, match="process 77 on other"):
        check(store, clock=clock)
    assert clock.elapsed_s < 5


def test_a_launch_elsewhere_that_is_silent_for_three_intervals_is_dead() -> None:
    store = MemoryStore()
    elsewhere(store, "theirs")
    beat(store, "theirs", 9)
    assert check(store) == pytest.approx(15)


def test_a_launch_elsewhere_that_has_ended_is_not_waited_for() -> None:
    store = MemoryStore()
    elsewhere(store, "theirs")
    beat(store, "theirs", 9, ended=True)
    assert check(store) == 0


def test_a_launch_elsewhere_that_shows_its_first_sign_late_refuses() -> None:
    store = MemoryStore()
    elsewhere(store, "theirs")
    with pytest.raises(ConflictError, match="in use"):
        check(store, clock=WatchedClock(lambda: beat(store, "theirs", 0)))


def test_another_container_on_a_machine_of_the_same_name_is_watched_not_looked_up() -> None:
    store = MemoryStore()
    elsewhere(store, "theirs", host=process.host())
    beat(store, "theirs", 1)
    with pytest.raises(ConflictError, match="in use"):
        check(store, clock=WatchedClock(lambda: beat(store, "theirs", 2)))


def test_bare_saves_are_never_waited_for_and_hide_no_launch() -> None:
    store = MemoryStore()
    new_generation(store, launch="bare")
    assert check(store) == 0
    elsewhere(store, "theirs")
    beat(store, "theirs", 1)
    new_generation(store, launch="bare")
    with pytest.raises(ConflictError, match="in use"):
        check(store, clock=WatchedClock(lambda: beat(store, "theirs", 2)))


@pytest.mark.parametrize("takeover", [True, False])
def test_a_launch_that_was_taken_over_never_claims_again(takeover: bool) -> None:
    store = MemoryStore()
    new_generation(store, launch="mine", heartbeat=True)
    heartbeat = Heartbeat(store, "mine")
    heartbeat.start()
    elsewhere(store, "theirs")
    beat(store, "theirs", 1, ended=True)
    with pytest.raises(ConflictError) as caught:
        check(store, takeover=takeover)
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    heartbeat.close()


def test_a_heartbeat_moves_until_it_is_closed_and_then_says_so() -> None:
    store = MemoryStore()
    key = layout.heartbeat("mine")
    heartbeat = Heartbeat(store, "mine", interval_s=0.02)
    heartbeat.start()
    assert is_alive(store, key, SYSTEM_CLOCK, interval_s=0.02)
    first = read_sign(store, key)
    for _ in range(500):
        now = read_sign(store, key)
        if now != first:
            break
        SYSTEM_CLOCK.sleep(0.01)
    assert first is not None
    assert now is not None
    assert now.count > first.count
    heartbeat.close()
    heartbeat.close()
    last = read_sign(store, key)
    assert last is not None
    assert last.ended
    assert not is_alive(store, key, SYSTEM_CLOCK, interval_s=0.02)


def test_a_beat_that_fails_is_skipped_and_remembered() -> None:
    class Broken(MemoryStore):
        broken = False

        def put(self, key, parts):  # type: ignore[no-untyped-def]
            if self.broken:
                raise StoreError("gone", kind=ErrorKind.UNREACHABLE, retryable=True)
            super().put(key, parts)

    store = Broken()
    heartbeat = Heartbeat(store, "mine", interval_s=0.01)
    heartbeat.start()
    store.broken = True
    for _ in range(500):
        if heartbeat.failure is not None:
            break
        SYSTEM_CLOCK.sleep(0.01)
    assert isinstance(heartbeat.failure, StoreError)
    heartbeat.close()
