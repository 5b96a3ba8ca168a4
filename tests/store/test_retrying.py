from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from resilient.store.retrying import Retrying
from tests.store.conformance import StoreConformance, together


class HandClock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.sleeps: list[float] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self.elapsed_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.elapsed_s += duration_s


class Shaky(MemoryStore):
    """Fails in the given ways, one call each, before it works; a create works all the same if answers are lost."""

    def __init__(self, faults: Sequence[Exception], *, answer_lost: bool = False) -> None:
        super().__init__("shaky")
        self.faults = list(faults)
        self.answer_lost = answer_lost
        self.calls = 0

    def _shake(self) -> None:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._shake()
        super().put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        if self.answer_lost:
            super().create(key, data)
        self._shake()
        return super().create(key, data)

    def get(self, key: str) -> bytes:
        self._shake()
        return super().get(key)


def passing(kind: ErrorKind = ErrorKind.THROTTLED) -> StoreError:
    return StoreError("slow down", kind=kind, hint="wait", retryable=True)


class TestRetryingStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return Retrying(MemoryStore("inner"))


def test_what_may_pass_is_tried_again_until_it_has_passed() -> None:
    inner, clock = Shaky([passing()] * 5), HandClock()
    Retrying(inner, clock=clock).put("key", [b"x"])
    assert inner.calls == 6
    assert len(clock.sleeps) == 5
    assert all(wait <= 0.2 * 2**turn for turn, wait in enumerate(clock.sleeps))


def test_waits_differ_between_ranks_that_failed_together() -> None:
    first, second = HandClock(), HandClock()
    for clock in (first, second):
        Retrying(Shaky([passing()] * 5), clock=clock).put("key", [b"x"])
    assert first.sleeps != second.sleeps


class Limited(MemoryStore):
    """Serves so many requests in each tenth of a second, and refuses all others as S3 does."""

    def __init__(self, most: int) -> None:
        super().__init__("limited")
        self._most = most
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._served = 0
        self.refused = 0

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._since_s + 0.1:
                self._since_s, self._served = now_s, 0
            self._served += 1
            if self._served > self._most:
                self.refused += 1
                raise passing()
        super().put(key, parts)


@pytest.mark.field_report("BR-130")
def test_64_writers_at_a_store_that_takes_fewer_requests_back_off_until_all_are_served() -> None:
    inner = Limited(10)
    store = Retrying(inner)

    def write(writer: int) -> None:
        for number in range(5):
            store.put(f"{writer}/{number}", [b"x"])

    together(64, write)
    assert len(list(inner.list(""))) == 64 * 5
    assert 64 <= inner.refused < 10 * 64 * 5, "they did not wait, or waited in step"


@pytest.mark.field_report("BR-130")
def test_the_deadline_is_one_for_all_tries_and_the_error_says_what_was_tried() -> None:
    inner, clock = Shaky([passing()] * 1_000), HandClock()
    with pytest.raises(StoreError) as caught:
        Retrying(inner, clock=clock, timeout_s=30.0).get("a/key")
    assert clock.elapsed_s <= 30.0
    said = f"get of 'a/key' in memory://shaky failed {inner.calls} times within 30 s, the last time with: slow down"
    assert str(caught.value) == said
    assert caught.value.kind is ErrorKind.THROTTLED
    assert caught.value.hint == "wait"
    assert str(caught.value.__cause__) == "slow down"


@pytest.mark.parametrize(
    "error",
    [
        StoreError("denied", kind=ErrorKind.ACCESS_DENIED),
        NotFoundError("absent", kind=ErrorKind.NO_SUCH_OBJECT),
        CorruptError("short", kind=ErrorKind.MALFORMED),
        RuntimeError("a bug"),
    ],
)
def test_what_does_not_pass_is_raised_at_once(error: Exception) -> None:
    inner = Shaky([error])
    with pytest.raises(type(error)) as caught:
        Retrying(inner, clock=HandClock()).get("key")
    assert caught.value is error
    assert inner.calls == 1


def test_a_create_whose_answer_was_lost_recognizes_its_own_object() -> None:
    store = Retrying(Shaky([passing(ErrorKind.DEADLINE)], answer_lost=True), clock=HandClock())
    assert store.create("claim", b"nonce")


def test_within_changes_the_deadline_only() -> None:
    inner, clock = Shaky([passing()] * 1_000), HandClock()
    with pytest.raises(StoreError, match="within 2 s"):
        Retrying(inner, clock=clock).within(2.0).put("key", [b"x"])
    assert clock.elapsed_s <= 2.0
