"""A save that is not over, as its saver knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from resilient.engine.handle import SaveHandle
from resilient.engine.stage import Staging
from resilient.engine.structures import Planned
from resilient.errors import ErrorKind, StoreError
from resilient.format.documents import Value
from resilient.state.leaves import Captured
from resilient.writer.slot import Slot

STORE: Final = "store"
TIERS: Final = "tiers"


@dataclass(slots=True, kw_only=True, eq=False)
class Saving:
    """A save that is not over. ``writer``: the number of the one that has it, or is just being told."""

    handle: SaveHandle
    slot: Slot
    planned: Planned
    values: tuple[Value, ...]
    staging: Staging
    started_s: float
    stores: bool  # False: it goes to the tiers of this node alone
    needed_by: set[str]  # whom the slot is kept for
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    trained: tuple[int, ...] = ()
    writer: int | None = None
    ordered_s: float | None = None
    ended: bool = False

    def give(self, writer: int, now_s: float) -> None:
        """Take note of which writer is just being told."""
        self.writer, self.ordered_s = writer, now_s

    @property
    def step(self) -> int:
        return self.handle.step


def saving_of(
    handle: SaveHandle,
    captured: Captured,
    planned: Planned,
    staging: Staging,
    started_s: float,
    slot: Slot,
    needed_by: set[str],
) -> Saving:
    """Return the save of a state that has just been staged."""
    return Saving(
        handle=handle,
        slot=slot,
        planned=planned,
        values=tuple(Value(leaf.item, leaf.name, leaf.path, leaf.data, leaf.rank) for leaf in captured.values),
        staging=staging,
        started_s=started_s,
        stores=STORE in needed_by,
        needed_by=needed_by,
    )


def still_in_flight(timeout_s: float) -> StoreError:
    """Return the error of a save for which no slot is free."""
    return StoreError(
        f"the save before is still not over after {timeout_s:g} s",
        kind=ErrorKind.SAVE_FAILED,
        hint="the store is slower than the saves: save less often, or look at the store",
    )
