"""An alarm, once, if a training that steps its optimizers saves the same parameters twice.

Each writer knows from its digests whether its own part has changed. Only if nothing has changed on any rank, the state
has not: one rank's part may be rows of an embedding that no sample used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from resilient.engine.agreement import Agreement
from resilient.events import Bus, StateUnchanged
from resilient.state.leaves import TensorLeaf
from resilient.writer.messages import Structure

_WAIT_S: Final = 2.0


class Freshness:
    """Of one rank; `look` and `numbers` are called by one thread, beside the training."""

    def __init__(self, agreement: Agreement, *, rank: int, bus: Bus) -> None:
        self._agreement = agreement
        self._rank = rank
        self._bus = bus
        self._before: int | None = None
        self._told = False
        self._key: tuple[int, tuple[int, ...]] | None = None
        self._numbers: tuple[int, ...] = ()

    def numbers(self, structure: Structure, tensors: Sequence[TensorLeaf], trained: Sequence[int]) -> tuple[int, ...]:
        """Return which of the tensors of a structure these leaves are; worked out once for each."""
        key = structure.number, tuple(trained)
        if key != self._key:
            names = {(tensors[leaf].item, tensors[leaf].name) for leaf in trained}
            found = (number for number, each in enumerate(structure.tensors) if (each.item, each.name) in names)
            self._key, self._numbers = key, tuple(found)
        return self._numbers

    def look(self, step: int, *, trained: bool, changed: bool | None) -> None:
        """Take note that a step is durable, and whether this rank's part of what was trained has changed (or None)."""
        before, self._before = self._before, step
        if not trained or changed or self._told:
            return
        self._agreement.tell_unchanged(step)
        if self._rank != 0 or changed is None or before is None:
            return
        if self._agreement.is_unchanged(step, _WAIT_S):
            self._told = True
            self._bus.emit(StateUnchanged(rank=self._rank, step=step, since=before))
