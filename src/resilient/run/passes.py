"""Going through the data once without leaving a trace in the random numbers of the run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from resilient.errors import ErrorKind, UsageError
from resilient.run.sampler import ElasticSampler
from resilient.state.items import unwrapped
from resilient.state.rng import Rng

T = TypeVar("T")

BEGINS_ANEW: Final = (
    "the position in the data is not restored: this data begins anew (an ElasticSampler would continue)"
)
_ORDERS_OF_TORCH: Final = (RandomSampler, SequentialSampler, DistributedSampler)


def start_pass(iterable: Iterable[T], rng: Rng, *, step: int, rank: int) -> Iterator[T]:
    """Return an iterator over ``iterable``; the global random state is afterwards what it was before.

    A ``DataLoader`` draws a seed when its iterator is made. A resume makes an iterator in the middle of an epoch,
    where the uninterrupted run made none: its random numbers would differ from then on.
    """
    before = rng.snapshot()
    # Seeds of its own for each pass: where nothing else draws, every epoch would see the same augmentations.
    rng.derive(before, step=step, rank=rank)
    iterator = iter(iterable)
    rng.restore(before, step=step, rank=rank)
    return iterator


def samplers_of(iterable: Iterable[object], tracked: Sequence[ElasticSampler]) -> tuple[ElasticSampler, ...]:
    """Return the samplers whose position moves with each batch of ``iterable``.

    That is the one which it has, if it shows one; else (a generator around a loader shows nothing) every tracked one.

    Raises:
        UsageError: it has one that is not tracked, so that its position would be lost; or one is tracked, and this
            loader draws its samples in torch's own order.
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
    # Of any other type it may be a wrapper around the tracked one.
    own_batches = type(getattr(iterable, "batch_sampler", None)) is BatchSampler
    if tracked and own_batches and type(getattr(iterable, "sampler", None)) in _ORDERS_OF_TORCH:
        raise UsageError(
            "this DataLoader draws its samples in an order of its own, not in that of the tracked ElasticSampler",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle and sampler",
        )
    return tuple(tracked)


class LoaderPosition:
    """Stands in for a tracked loader with its state at the last boundary: drawing a batch moves the loader itself."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name = name
        self._loader = loader
        self.hold()

    def hold(self) -> None:
        """Take the state as it is now."""
        self._state = copy.deepcopy(self._loader.state_dict())

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)


def position_of(iterable: Iterable[object], items: Mapping[str, object]) -> LoaderPosition | None:
    """Return the position of a loader that is itself among the items and has a state; None for any other data."""
    loader: Any = iterable
    names = [name for name, item in items.items() if unwrapped(item) is loader and hasattr(loader, "state_dict")]
    return LoaderPosition(names[0], loader) if names else None
