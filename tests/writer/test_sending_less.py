"""What need not be sent is not: what an earlier save has stored, and what compression takes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from resilient.catalog.contents import read_manifest
from resilient.catalog.line import read_line
from resilient.catalog.prune import give_up
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.format.codec import RAW
from resilient.format.digest import BytesLike
from resilient.policy.incremental import REWRITE_EVERY
from resilient.policy.keep import Keep
from resilient.store.memory import MemoryStore
from resilient.writer import compressing, packing
from resilient.writer.in_thread import ThreadWriter
from resilient.writer.messages import Committed, Failed, Persisted
from resilient.writer.run_queue import RunQueue
from tests.catalog.runs import HandClock, attempt_of, new_generation
from tests.writer.staging import Array, Trainer, is_step, opened


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def begin(store: MemoryStore, world_size: int = 1, *, clock: Clock = SYSTEM_CLOCK, **settings: Any) -> Trainer:
        trainer = Trainer(new_generation(store), chunk_nbytes=1 << 12)
        first = opened(store, trainer.claim, 0, world_size, **settings)
        trainer.has(lambda heard: ThreadWriter(store, first, trainer.slots, heard, clock=clock))
        trainers.append(trainer)
        return trainer

    yield begin
    for each in trainers:
        assert each.link is not None
        assert each.link.close(30)


def mostly_frozen(step: int, frozen: float = 0.9) -> dict[str, Array]:
    draw = np.random.default_rng(7)
    count = 1 << 16
    kept = int(count * frozen)
    arrays: dict[str, Array] = {
        "base": draw.standard_normal(kept).astype(np.float32),
        "adapter": draw.standard_normal(count - kept).astype(np.float32) + np.float32(step),
    }
    return arrays


def sent(trainer: Trainer, step: int, arrays: dict[str, Array]) -> float:
    """Save, and return the share of the bytes that was sent."""
    trainer.save(step, arrays, new=step == 1)
    persisted = trainer.wait(Persisted, step)
    assert isinstance(trainer.outcome(step), Committed)
    return persisted.sent / persisted.nbytes


@pytest.mark.parametrize("compress", ["off", "zstd:1"])
def test_what_has_not_changed_is_sent_once_in_a_while_and_every_save_is_whole(
    start: Callable[..., Trainer], compress: str
) -> None:
    store = MemoryStore()
    trainer = start(store, compress=compress)
    shares = [sent(trainer, step, mostly_frozen(step)) for step in range(1, 2 * REWRITE_EVERY)]
    full = [step for step, share in enumerate(shares, 1) if share > 0.5]
    assert full == [1, 1 + REWRITE_EVERY], shares
    assert all(share <= 0.12 for step, share in enumerate(shares, 1) if step not in full), shares
    for step in range(1, 2 * REWRITE_EVERY):
        is_step(store, step, mostly_frozen(step))
    newest = read_manifest(store, read_line(store).commits[0])
    assert {key.rpartition("/")[2].partition("-")[0] for key in (each.key for each in newest.objects)} == {
        f"{1 + REWRITE_EVERY:012d}",
        f"{2 * REWRITE_EVERY - 1:012d}",
    }


def test_a_state_that_changes_everywhere_is_sent_whole(start: Callable[..., Trainer]) -> None:
    trainer = start(MemoryStore())
    assert [sent(trainer, step, mostly_frozen(step, frozen=0.0)) for step in range(1, 5)] == [1.0] * 4
    # Frozen from now on: the first such save finds out, and the next ones profit.
    shares = [sent(trainer, step, mostly_frozen(4, frozen=0.0)) for step in range(5, 9)]
    assert shares[-1] == 0.0, shares


def test_nothing_refers_to_a_save_that_is_not_committed(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, world_size=2, commit_timeout_s=0.1)  # the other rank never comes
    for step in (1, 2):
        trainer.save(step, mostly_frozen(step), new=step == 1)
        assert isinstance(trainer.outcome(step), Failed)
        assert trainer.wait(Persisted, step).sent == trainer.wait(Persisted, step).nbytes


def test_nothing_refers_to_a_save_that_was_given_up(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store)
    assert sent(trainer, 1, mostly_frozen(1)) == 1.0
    assert sent(trainer, 2, mostly_frozen(2)) < 0.12
    for step in (1, 2):  # all that hold the bytes: the save that has them, and the one that referred to it
        give_up(store, attempt_of(trainer.claim, step), SYSTEM_CLOCK, reason="test")
    assert sent(trainer, 3, mostly_frozen(3)) == 1.0
    assert sent(trainer, 4, mostly_frozen(4)) < 0.12


def test_retention_never_takes_what_a_kept_save_refers_to(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, keep=Keep(last=1))
    shares = []
    for step in range(1, 12):
        shares.append(sent(trainer, step, mostly_frozen(step)))
        is_step(store, step, mostly_frozen(step))
    full = [step for step, share in enumerate(shares, 1) if share > 0.5]
    assert full == [1, 1 + REWRITE_EVERY], "although the full save is soon one that retention gave up"


def weights(seed: int, nbytes: int) -> Array:
    """Return numbers whose high bytes compress and whose low ones do not, as trained ones are."""
    return np.random.default_rng(seed).standard_normal(nbytes // 4).astype(np.float32)


def test_compressed_pieces_come_back_and_those_that_do_not_shrink_are_stored_as_they_are(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_ENCODED_AT_ONCE", 1 << 16)
    store = MemoryStore()
    trainer = start(store, compress="zstd:3")
    trainer.chunk_nbytes = 1 << 14
    noise = np.random.default_rng(1).integers(0, 256, 1 << 17, np.uint8)
    arrays = {"weights": weights(1, 1 << 18), "zeros": np.zeros(1 << 16, np.float64), "noise": noise}
    nbytes = sum(each.nbytes for each in arrays.values())
    assert sent(trainer, 1, arrays) < 0.6
    is_step(store, 1, arrays)
    manifest = read_manifest(store, read_line(store).at(1))
    raw = {manifest.tensors[chunk.tensor].name for chunk in manifest.chunks if chunk.codec == RAW}
    assert raw == {"noise"}
    assert len(manifest.objects) == -(-nbytes // (1 << 16)), "as much at once as memory is allowed for"


class Ticking(HandClock):
    """A clock that moves at each look: in that time a mebibyte is encoded."""

    TICK_S = 0.001

    def monotonic(self) -> float:
        self.elapsed_s += self.TICK_S
        return self.elapsed_s


class Slow(MemoryStore):
    """A store that takes so many bytes a second."""

    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.clock = clock
        self.bytes_per_s = 1e12

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        # Less a tick, or nearly: looking at the clock takes none of the store's time.
        self.clock.elapsed_s += sum(map(len, parts)) / self.bytes_per_s - 0.9 * Ticking.TICK_S
        super().put(key, parts)


@pytest.fixture
def starved_s(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return what this process waits for a processor during each upload, whatever else this machine does."""
    waits = {"of each": 0.0}
    monkeypatch.setattr(RunQueue, "waited_s", lambda _: waits["of each"])
    return waits


def test_saves_are_compressed_only_while_the_store_is_slower_than_that(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, starved_s: dict[str, float]
) -> None:
    monkeypatch.setattr(compressing, "_LEAST_NBYTES", 1 << 18)
    store = Slow(clock := Ticking())
    trainer = start(store, clock=clock, compress="auto")
    trainer.chunk_nbytes = 1 << 18
    shares = []
    for step, bytes_per_s in enumerate([1e12, 1e12, 5e6, 5e6, 5e6, 1e12, 1e12], 1):
        store.bytes_per_s = bytes_per_s
        shares.append(sent(trainer, step, {"weights": weights(step, 1 << 20)}))
        is_step(store, step, {"weights": weights(step, 1 << 20)})
    assert [share < 0.95 for share in shares] == [False, False, False, True, True, True, False], shares


def test_a_training_that_leaves_no_processor_idle_makes_no_store_look_slow(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, starved_s: dict[str, float]
) -> None:
    monkeypatch.setattr(compressing, "_LEAST_NBYTES", 1 << 18)
    store = Slow(clock := Ticking())
    trainer = start(store, clock=clock, compress="auto")
    trainer.chunk_nbytes = 1 << 18
    store.bytes_per_s, starved_s["of each"] = 5e6, (1 << 20) / 5e6
    shares = [sent(trainer, step, {"weights": weights(step, 1 << 20)}) for step in (1, 2, 3)]
    assert min(shares) > 0.95


def test_an_upload_that_is_bounded_is_slow_however_fast_the_store(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, starved_s: dict[str, float]
) -> None:
    monkeypatch.setattr(compressing, "_LEAST_NBYTES", 1 << 18)
    clock = Ticking()
    trainer = start(MemoryStore(), clock=clock, compress="auto", max_bandwidth=5e6)
    trainer.chunk_nbytes = 1 << 18
    shares = [sent(trainer, step, {"weights": weights(step, 1 << 20)}) for step in (1, 2, 3)]
    assert [share < 0.95 for share in shares] == [False, True, True]
    assert clock.elapsed_s >= sum(shares[:2]) * (1 << 20) / 5e6
