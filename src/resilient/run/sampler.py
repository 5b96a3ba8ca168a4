"""Which samples a batch has: an order of seed and epoch alone, a position that any number of ranks can go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from resilient.config import read_process
from resilient.errors import ErrorKind, UsageError

_FIXED: Final = ("length", "global_batch", "seed", "shuffle", "drop_last")


class ElasticSampler:
    """A batch sampler that serves any number of ranks and continues where the last completed step ended.

    The global order depends on ``seed`` and the epoch only. The position is the number of samples that completed
    steps have used, so it means the same on every world size: each sample of an epoch is used exactly once, in the
    same order, through restarts and changes of size. Give it to a ``DataLoader`` as ``batch_sampler``, and to
    ``run.track``, which saves and restores the position.

    Each global batch is cut into one contiguous part a rank, whose sizes differ by at most one. Multiply the loss
    by `loss_weight` (``run.loss_weight``) where they do differ: the mean over the ranks is then the mean over the
    global batch.

    The last batch of an epoch is short if ``global_batch`` does not divide ``length``; ``drop_last`` leaves it out.
    If it has fewer samples than there are ranks, a rank for which none is left gets the first sample of the batch,
    with `loss_weight` 0: it has to take part in the step, and a mean over nothing would be NaN on every rank.

    ``micro_batch`` bounds what a rank computes at once: fewer ranks then accumulate the gradients of more of these,
    and a step stays the step of the same global batch. Each batch of a rank comes as `accumulation` lists, whose sizes
    differ by at most one; their number is the same on every rank, because each of them may be a collective. A turn of
    ``run.steps`` gets them all, as one `resilient.run.micro_batches.MicroBatches`.

    A loop without a ``Run`` calls `advance` after each step, and with ``micro_batch`` `take` before each micro-batch.
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        seed: int,
        shuffle: bool = True,  # noqa: FBT001, FBT002 -- positional in the promised signature
        drop_last: bool = False,  # noqa: FBT001, FBT002 -- as above
        *,
        micro_batch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Describe the order.

        Args:
            length: number of samples of the data set.
            global_batch: samples of one step, over all ranks.
            seed: of the order; 0 or larger.
            shuffle: False takes the samples in the order of the data set.
            drop_last: leave the short last batch of an epoch out.
            micro_batch: the most samples that one rank computes at once; None: its whole part of the batch. No part of
                the order: it may be another one after a restart, on devices with more memory for example.
            rank: which part of each batch; by default the rank in the process group, else the launcher's. Ranks
                that compute one sample together (tensor parallel) pass the same data-parallel rank.
            world_size: into how many parts each batch is cut; goes with ``rank``.
        """
        if length < 1 or global_batch < 1 or not 0 <= seed < 2**64:
            raise _invalid(
                f"ElasticSampler(length={length}, global_batch={global_batch}, seed={seed}): the first two must be at"
                " least 1, the seed between 0 and 2**64"
            )
        if drop_last and length < global_batch:
            raise _invalid(f"drop_last leaves nothing of {length} samples in batches of {global_batch}")
        if micro_batch is not None and micro_batch < 1:
            raise _invalid(f"micro_batch of an ElasticSampler is {micro_batch}: it must be at least 1")
        if (rank is None) != (world_size is None):
            raise _invalid("rank and world_size of an ElasticSampler go together")
        self.length = length
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.micro_batch = micro_batch
        self.epoch = 0
        self.consumed = 0
        self.skipped: list[tuple[int, int, int]] = []
        """Batches whose samples were left out: their epoch, their position in its order, and their size."""
        self._left_out: set[tuple[int, int]] = set()  # those to come
        self._taken = 0
        self._place = None if rank is None or world_size is None else (rank, world_size)

    @property
    def accumulation(self) -> int:
        """How many micro-batches make the current step, on every rank: 1 without ``micro_batch``."""
        return self._micro_batches(self._batch_size(self.consumed))

    @property
    def loss_weight(self) -> float:
        """What to multiply the mean loss of this rank's batch with: its samples, times ranks, over all of the step.

        With ``micro_batch``: of the micro-batch that was taken last.
        """
        size = self._batch_size(self.consumed)
        start, stop = self._part(size, self._taken)
        return (stop - start) * self._parts()[1] / size

    def take(self, micro_batch: int) -> None:
        """Let `loss_weight` be that of one of the micro-batches of the current step, counted from 0."""
        if not 0 <= micro_batch < self.accumulation:
            raise _invalid(f"this step has no micro-batch {micro_batch}: there are {self.accumulation}, counted from 0")
        self._taken = micro_batch

    def advance(self) -> None:
        """Count the current batch as used: its step is complete."""
        self._taken = 0
        self._pass()
        self._pass_left_out()

    def skip(self) -> None:
        """Leave out the samples of the current batch: count them as used by no step."""
        self.skipped.append((self.epoch, self.consumed, self._batch_size(self.consumed)))
        self.advance()

    def leave_out(self, epoch: int, consumed: int) -> None:
        """Leave out a batch by its place in the order, if it is still to come; not while an iterator is in use."""
        self._left_out.add((epoch, consumed))
        self._pass_left_out()

    def __len__(self) -> int:
        """Return how many batches a whole epoch has on this rank; of micro-batches, if there are any."""
        whole, rest = divmod(self.length, self.global_batch)
        batches = whole * self._micro_batches(self.global_batch)
        return batches if self.drop_last or not rest else batches + self._micro_batches(rest)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch, from the position to the end of the epoch; moves nothing."""
        order, epoch, position = self._order(), self.epoch, self.consumed
        while size := self._batch_size(position):
            batch = order[position : position + size]
            position += size
            if (epoch, position - size) in self._left_out:
                continue
            for micro_batch in range(self._micro_batches(size)):
                start, stop = self._part(size, micro_batch)
                yield (batch[start:stop] if start < stop else batch[:1]).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, what was left out, and what the order depends on."""
        to_come = sorted(place for place in self._left_out if place >= (self.epoch, self.consumed))
        listed = {"skipped": [list(each) for each in self.skipped], "left_out": [list(each) for each in to_come]}
        fixed = {name: getattr(self, name) for name in _FIXED}
        position = {"epoch": self.epoch, "consumed": self.consumed}
        return {**position, **{name: each for name, each in listed.items() if each}, **fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position.

        Raises:
            UsageError: kind ``mismatch``, if it belongs to another order; every difference is named.
        """
        differing = [
            f"{name} was {state[name]}, is {getattr(self, name)}"
            for name in _FIXED
            if state[name] != getattr(self, name)
        ]
        if differing:
            raise UsageError(
                f"the position of an ElasticSampler belongs to another order of samples: {'; '.join(differing)}",
                kind=ErrorKind.MISMATCH,
                hint="make the sampler as it was, or start over in another place",
            )
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        self.skipped = [(int(epoch), int(at), int(size)) for epoch, at, size in state.get("skipped", ())]
        self._left_out |= {(int(epoch), int(at)) for epoch, at in state.get("left_out", ())}

    def _pass(self) -> None:
        self.consumed += self._batch_size(self.consumed)
        if self._batch_size(self.consumed) == 0:
            self.epoch, self.consumed = self.epoch + 1, 0

    def _pass_left_out(self) -> None:
        while (self.epoch, self.consumed) in self._left_out:
            self.skipped.append((self.epoch, self.consumed, self._batch_size(self.consumed)))
            self._pass()

    def _batch_size(self, start: int) -> int:
        """Return the size of the batch that starts there; 0 at the end of the epoch."""
        left = self.length - start
        return 0 if self.drop_last and left < self.global_batch else min(left, self.global_batch)

    def _micro_batches(self, size: int) -> int:
        """Return into how many pieces each rank cuts its part of a batch: as many as the largest part needs."""
        if self.micro_batch is None or size == 0:
            return 1
        largest = -(-size // self._parts()[1])
        return -(-largest // self.micro_batch)

    def _part(self, size: int, micro_batch: int) -> tuple[int, int]:
        """Return where in a batch this rank's piece of it starts and stops."""
        rank, world_size = self._parts()
        first, end = _cut(size, rank, world_size), _cut(size, rank + 1, world_size)
        pieces = self._micro_batches(size)
        return first + _cut(end - first, micro_batch, pieces), first + _cut(end - first, micro_batch + 1, pieces)

    def _order(self) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length)
        # The sorting order of a counter-based generator's raw stream, which is the same on every platform and in
        # every release of numpy; the streams of shuffling functions are not promised to be.
        keys = np.random.Philox(key=np.array([self.seed, self.epoch], dtype=np.uint64)).random_raw(self.length)
        return np.argsort(keys, kind="stable")

    def _parts(self) -> tuple[int, int]:
        """Return which part this rank takes, and of how many."""
        rank, world_size = self._place or _place_in_job()
        if self.global_batch < world_size:
            raise _invalid(
                f"a global batch of {self.global_batch} cannot feed {world_size} ranks",
                "make global_batch at least the number of ranks",
            )
        return rank, world_size


def _place_in_job() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    process = read_process()
    return process.rank, process.world_size


def _cut(size: int, part: int, parts: int) -> int:
    """Return where a part of a batch starts."""
    return size * part // parts


def _invalid(message: str, hint: str | None = None) -> UsageError:
    return UsageError(message, kind=ErrorKind.INVALID_ARGUMENT, hint=hint)
