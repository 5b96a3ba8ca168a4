from __future__ import annotations

import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from resilient.store import fsspec_store
from resilient.store.base import Store
from resilient.store.fsspec_store import FsspecStore
from resilient.store.memory import MemoryStore
from resilient.store.retrying import Retrying
from resilient.store.throttled import UNBOUNDED, Bandwidth, Throttled, throttled
from tests.store.conformance import StoreConformance, together
from tests.store.test_retrying import HandClock, Shaky, passing


class TestThrottledStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return Throttled(MemoryStore("inner"), Bandwidth(1e12))


def test_the_first_piece_goes_at_once_and_each_waits_for_what_went_before() -> None:
    clock = HandClock()
    bandwidth = Bandwidth(100.0, clock=clock)
    moments = []
    for nbytes in (50, 200, 0, 100):
        bandwidth.wait(nbytes)
        moments.append(clock.elapsed_s)
    assert moments == [0.0, 0.5, 2.5, 2.5]


def test_a_pause_does_not_save_up_for_a_burst() -> None:
    clock = HandClock()
    bandwidth = Bandwidth(100.0, clock=clock)
    bandwidth.wait(100)
    clock.elapsed_s = 1_000.0
    bandwidth.wait(100)
    bandwidth.wait(100)
    assert clock.elapsed_s == 1_001.0


def test_all_threads_share_one_bandwidth() -> None:
    class Still(HandClock):
        """Nobody's waiting moves the time of others."""

        def sleep(self, duration_s: float) -> None:
            self.sleeps.append(duration_s)

    clock = Still()
    bandwidth = Bandwidth(10.0, clock=clock)
    together(8, lambda index: bandwidth.wait(10))
    assert sorted(clock.sleeps) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_no_bandwidth_at_all_is_refused() -> None:
    for nothing in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="more than nothing"):
            Bandwidth(nothing)


def test_what_is_unbounded_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with UNBOUNDED._lock:  # as a forked child may find it
        worker = threading.Thread(target=UNBOUNDED.wait, args=(1 << 40,), daemon=True)
        worker.start()
        worker.join(10)
        assert not worker.is_alive()


def test_a_store_that_sends_pieces_waits_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "_BLOCK_BYTES", 1_000)
    clock = HandClock()
    store = throttled(FsspecStore(MemoryFileSystem(), "/throttled/run"), Bandwidth(1_000.0, clock=clock))
    assert isinstance(store, FsspecStore)
    store.put("large", [bytes(2_500), bytes(2_500)])
    assert clock.sleeps == [1.0] * 4
    assert store.size("large") == 5_000


def test_documents_and_reads_do_not_wait() -> None:
    clock = HandClock()
    store = throttled(MemoryStore("inner"), Bandwidth(1.0, clock=clock))
    store.put("first", [bytes(1_000)])
    assert store.create("claim", b"mine")
    assert store.get("first") == bytes(1_000)
    assert clock.sleeps == []
    store.put("second", [b"x"])
    assert clock.sleeps == [1_000.0]


def test_what_is_sent_again_counts_again() -> None:
    clock = HandClock()
    store = Retrying(Shaky([passing()]), clock=HandClock()).throttled(Bandwidth(100.0, clock=clock))
    store.put("key", [bytes(100)])
    assert clock.sleeps == [1.0]
    store.within(5.0).put("key", [b"x"])
    assert clock.sleeps == [1.0, 1.0]
