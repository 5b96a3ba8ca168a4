"""The state at the last step boundary: drawing a batch moves parts of it, and those are held as they were."""

from __future__ import annotations

from collections.abc import Mapping

from resilient.run.passes import LoaderPosition
from resilient.state.capturer import Capturer
from resilient.state.leaves import Captured
from resilient.state.rng import Rng
from resilient.state.wrappers import PerRank


class BoundaryState:
    """The items of a run, as they were at the last `hold`; ``rng`` is one of them."""

    def __init__(self, items: Mapping[str, object], rng: Rng, *, rank: int, world_size: int) -> None:
        self._items = dict(items)
        self._rng = rng
        self._rank = rank
        self._world_size = world_size
        self._loader: LoaderPosition | None = None
        self._capturer = Capturer(self._items, rank=rank, world_size=world_size)
        rng.hold()

    @property
    def has_loader(self) -> bool:
        """Whether the data is one of the items, with a position of its own."""
        return self._loader is not None

    def follow(self, loader: LoaderPosition | None) -> None:
        """Take the position of this loader for its state from now on, if the data is a tracked loader."""
        if loader is None and self._loader is None:
            return
        self._loader = loader
        items = dict(self._items)
        if loader is not None:
            items[loader.name] = PerRank(loader) if isinstance(items[loader.name], PerRank) else loader
        self._capturer = Capturer(items, rank=self._rank, world_size=self._world_size)

    def hold(self) -> None:
        """Remember this moment as the boundary."""
        self._rng.hold()
        if self._loader is not None:
            self._loader.hold()

    def capture(self) -> Captured:
        """Return the state; raises what `resilient.state.capture.capture` raises."""
        return self._capturer.capture()
