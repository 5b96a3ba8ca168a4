"""The micro-batches of a step, for a loop that accumulates gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from resilient.run.misuse import misused
from resilient.run.sampler import ElasticSampler

T = TypeVar("T")


class MicroBatches(Sequence[T], Generic[T]):
    """What one turn of ``run.steps`` gets, if its `ElasticSampler` has a ``micro_batch``: the step's micro-batches.

    Each one that is looked at becomes the one that ``run.loss_weight`` is about.
    """

    def __init__(self, batches: Sequence[T], samplers: Sequence[ElasticSampler]) -> None:
        self._batches = batches
        self._samplers = samplers

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            raise TypeError("micro-batches are taken one by one, because each has a run.loss_weight of its own")
        found = self._batches[index]
        for sampler in self._samplers:
            sampler.take(index % len(self._batches))
        return found


def in_steps(batches: Iterator[T], samplers: Sequence[ElasticSampler]) -> Iterator[Any]:
    """Yield what each turn gets: a batch as it is, or the micro-batches of a step where there are some.

    All of a step are there when its turn begins: what drawing them changes (random numbers, the position of a loader)
    is not in the middle of changing at a boundary.

    Raises:
        UsageError: the data is not that of the samplers, or they differ in the number of micro-batches.
    """
    if all(sampler.micro_batch is None for sampler in samplers):
        yield from batches
        return
    while True:
        numbers = {sampler.accumulation for sampler in samplers}
        if len(numbers) > 1:
            raise misused(
                f"the samplers of this data differ in the micro-batches of a step: {sorted(numbers)}",
                "give them the same global_batch and micro_batch",
            )
        (number,) = numbers
        found = list(itertools.islice(batches, number))
        if not found:
            return
        if len(found) < number:
            raise misused(
                f"the data ended within a step, after {len(found)} of {number} micro-batches",
                "draw it by the ElasticSampler alone: DataLoader(dataset, batch_sampler=sampler)",
            )
        yield MicroBatches(found, samplers)
