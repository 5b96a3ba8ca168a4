"""Two ranks that save, one after the other in one thread, on clocks that nobody waits for: each run is like the last.

The ranks are the real workers of `resilient.writer`; only what is between a trainer and its writer is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.run_info import open_run
from resilient.format.documents import Claim
from resilient.policy.keep import Keep
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from resilient.writer.messages import Answer, Committed, Failed, Save, Structure
from resilient.writer.slot import Slot
from resilient.writer.worker import Worker
from tests.catalog.runs import HandClock
from tests.writer.staging import Array, Trainer, opened

SIZE = 2
TIMEOUT_S = 5.0


def arrays_of(rank: int, step: int) -> dict[str, Array]:
    """Return what a rank stores: mostly what never changes."""
    frozen = np.random.default_rng(rank).standard_normal(256).astype(np.float32)
    return {f"base{rank}": frozen, f"top{rank}": np.full(64, 10 * step + rank, np.float32)}


def expected(step: int) -> dict[str, Array]:
    """Return what a checkpoint holds, as `check_run` wants it."""
    return {f"model.{name}": array for rank in range(SIZE) for name, array in arrays_of(rank, step).items()}


class Turns(HandClock):
    """A clock that gives another rank its turn, once, when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Callable[[], None] | None = None

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self.let()

    def let(self) -> None:
        other, self.other = self.other, None
        if other is not None:
            other()


class Direct:
    """A link that does at once what it is told."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.alive = True

    def wait_ready(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def define(self, structure: Structure) -> None:
        self.worker.define(structure)

    def save(self, order: Save) -> None:
        self.worker.save(order)

    def abandon(self, step: int, why: str) -> None:
        self.worker.abandon(step, why)

    def kill(self) -> None:
        raise NotImplementedError

    def close(self, timeout_s: float) -> bool:
        return True


class TwoRanks:
    """One life of a job; continues from the newest checkpoint, ``newest``."""

    def __init__(self, store: Store, *, keep: Keep | None = None) -> None:
        self.clocks = [Turns() for _ in range(SIZE)]
        open_run(store, create=True, clock=self.clocks[0])
        commits = read_line(store).commits
        continues = commits[0] if commits else None
        self.newest = 0 if continues is None else continues.step
        self.claim: Claim = claim_generation(store, world_size=SIZE, launch="a", heartbeat=False, clock=self.clocks[0])
        write_base(store, self.claim, continues)
        self.trainers: list[Trainer] = []
        self.workers: list[Worker] = []
        for rank, clock in enumerate(self.clocks):
            trainer = Trainer(self.claim, slots=[Slot.create("a"), Slot.create("b")], chunk_nbytes=256)
            first = opened(store, self.claim, rank, SIZE, commit_timeout_s=TIMEOUT_S, keep=keep)
            worker = Worker(store, first, trainer.slots, trainer.hear, clock=clock)
            trainer.link = Direct(worker)
            self.trainers.append(trainer)
            self.workers.append(worker)

    def stage(self, step: int, slot: int = 0) -> list[Save]:
        """Return the orders to save a step."""
        first = all(trainer._structures == 0 for trainer in self.trainers)
        return [
            trainer.staged(step, arrays_of(rank, step), replicas=arrays_of(1 - rank, step), slot=slot, new=first)
            for rank, trainer in enumerate(self.trainers)
        ]

    def carry_out(self, orders: Sequence[Save]) -> list[Answer]:
        """Let both ranks save; return the last word of each, rank 1's first.

        Rank 1 begins; rank 0 has its turn while rank 1 waits for the commit. If rank 0 cannot, rank 1 takes over.
        """
        zero, one = self.workers
        heard = [len(trainer.answers) for trainer in self.trainers]
        clock = self.clocks[1]
        clock.other = lambda: zero.save(orders[0])
        one.save(orders[1])
        step = orders[1].step
        if clock.other is not None:  # it never came to wait: as the engine does, tell the other one
            zero.abandon(step, "rank 1 has failed")
            clock.let()
        said = [
            each
            for trainer, before in zip(reversed(self.trainers), reversed(heard), strict=True)
            for each in trainer.answers[before:]
            if isinstance(each, Committed | Failed)
        ]
        return list(said)

    def save(self, *steps: int, report: Callable[[int], None] = lambda _: None, overlapping: bool = False) -> None:
        """Save steps, one after another; ``overlapping``: the next one is staged before the one before is written."""
        if overlapping:
            waiting = [(steps[0], self.stage(steps[0], 0))]
            for number, (_, later) in enumerate(pairwise(steps), 1):
                waiting.append((later, self.stage(later, number % 2)))
                self._finish(*waiting.pop(0), report)
            self._finish(*waiting.pop(), report)
            return
        for step in steps:
            self._finish(step, self.stage(step), report)

    def _finish(self, step: int, orders: Sequence[Save], report: Callable[[int], None]) -> None:
        if any(isinstance(said, Committed) for said in self.carry_out(orders)):
            report(step)

    def why_failed(self) -> list[str]:
        return [each.error.message for one in self.trainers for each in one.answers if isinstance(each, Failed)]

    def close(self) -> None:
        for trainer in self.trainers:
            for slot in trainer.slots:
                slot.close()


def go_on(store: Store, *, keep: Keep | None = None) -> int:
    """Be the next life: continue, save one more step, and return it."""
    life = TwoRanks(store, keep=keep)
    step = life.newest + 1
    saved: list[int] = []
    life.save(step, report=saved.append)
    assert saved == [step], life.why_failed()
    life.close()
    return step


def content(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}


def replay(objects: dict[str, bytes], store: Store) -> None:
    for key, data in objects.items():
        store.put(key, [data])


def saved_run(*steps: int) -> dict[str, bytes]:
    """Return the objects of a run of one life that has saved these steps."""
    store = MemoryStore()
    life = TwoRanks(store)
    done: list[int] = []
    life.save(*steps, report=done.append)
    assert done == list(steps), life.why_failed()
    life.close()
    return content(store)
