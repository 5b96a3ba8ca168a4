"""Going through the data once without leaving a trace in the random numbers of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from resilient.errors import ErrorKind, UsageError
from resilient.run.sampler import ElasticSampler
from resilient.state.rng import Rng

T = TypeVar("T")


def start_pass(iterable: Iterable[T], rng: Rng, *, step: int, rank: int) -> Iterator[T]:
    """Return an iterator over ``iterable``; the global random state is afterwards what it was before.

    A ``DataLoader`` draws a seed when its iterator is made. A resume makes an iterator in the middle of an epoch,
    where the uninterrupted run made none: its random numbers would differ from then on.
    """
    before = rng.snapshot()
    iterator = iter(iterable)
    rng.restore(before, step=step, rank=rank)
    return iterator


def samplers_of(iterable: Iterable[object], tracked: Sequence[ElasticSampler]) -> tuple[ElasticSampler, ...]:
    """Return the samplers whose position moves with each batch of ``iterable``.

    That is the one which it has, if it shows one; else (a generator around a loader shows nothing) every tracked one.

    Raises:
        UsageError: it has one that is not tracked, so that its position would be lost.
    """
    for candidate in (iterable, getattr(iterable, "batch_sampler", None), getattr(iterable, "sampler", None)):
        if isinstance(candidate, ElasticSampler):
            if not any(candidate is each for each in tracked):
                raise UsageError(
                    "the ElasticSampler of this data is not tracked, so its position would be lost",
                    kind=ErrorKind.INVALID_ARGUMENT,
                    hint="pass it to run.track, as in run.track(..., data=sampler)",
                )
            return (candidate,)
    return tuple(tracked)


def knows_its_position(iterable: Iterable[object], items: Iterable[object]) -> bool:
    """Say whether ``iterable`` is itself among the tracked items, so that it restores its own position."""
    loader: Any = iterable
    return any(item is loader for item in items)
