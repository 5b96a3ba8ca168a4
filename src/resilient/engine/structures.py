"""How the state is divided and laid out, worked out once for each structure that it takes."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from resilient.engine.agreement import Agreement
from resilient.engine.division import divide, signature
from resilient.engine.placement import Placement, place, structure_of
from resilient.format.documents import Item
from resilient.state.collector import nothing_collected
from resilient.state.leaves import Captured, TensorLeaf
from resilient.writer.messages import Structure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The layout of one structure. ``agreed``: whether all ranks hold the same plain tensors; None: not yet known.

    ``compares``: large replicas are staged to be compared.
    """

    items: tuple[Item, ...]
    tensors: tuple[TensorLeaf, ...]
    signature: bytes
    agreed: bool | None
    compares: bool
    placement: Placement
    structures: dict[bool, Structure] = field(default_factory=dict)  # with the spares or without


class Structures:
    """The layouts of one rank. The newest is kept: it serves as long as a capture yields the same leaves."""

    def __init__(self, *, rank: int, world_size: int, chunk_nbytes: int, agreement: Agreement) -> None:
        self._rank = rank
        self._world_size = world_size
        self._chunk_nbytes = chunk_nbytes
        self._agreement = agreement
        self._numbers = itertools.count()
        self._newest: Planned | None = None
        self._compared: set[bytes] = set()
        self._lock = threading.Lock()

    def plan(self, captured: Captured) -> Planned:
        """Return the layout of a captured state; waits for nobody."""
        with self._lock:
            newest = self._newest
            known = newest is not None and newest.tensors is captured.tensors
            plain = newest.signature if newest is not None and known else signature(captured)
            agreed = self._agreement.known(plain)
            compares = self._world_size > 1 and plain not in self._compared
            if newest is None or not known or (newest.agreed, newest.compares) != (agreed, compares):
                newest = self._newest = self._planned(captured, plain, agreed=agreed, compares=compares)
            return newest

    def anticipate(self, captured: Captured) -> Planned:
        """Return the layout after the ranks have compared what they hold: at their first boundary, all of them."""
        self._agreement.compare(signature(captured), "first")
        planned = self.plan(captured)
        self.settle(planned, topic="first")
        return planned

    def settle(self, planned: Planned, *, topic: str) -> Structure:
        """Return what the writer has to know, after the ranks have compared what they hold, if they have not yet."""
        agreed = planned.agreed
        with_spares = agreed is None and not self._agreement.compare(planned.signature, topic)
        with self._lock:
            known = planned.structures.get(with_spares)
            if known is None:
                number = next(self._numbers)
                known = structure_of(planned.items, planned.tensors, planned.placement, number, with_spares=with_spares)
                planned.structures[with_spares] = known
            return known

    def committed(self, planned: Planned) -> None:
        """Take note that the replicas of this structure were compared, and were equal."""
        if planned.compares:
            self._compared.add(planned.signature)

    @nothing_collected()
    def _planned(self, captured: Captured, plain: bytes, *, agreed: bool | None, compares: bool) -> Planned:
        pieces = list(
            divide(captured, world_size=self._world_size, chunk_nbytes=self._chunk_nbytes, agreed=agreed is not False)
        )
        placement = place(captured, pieces, rank=self._rank, agreed=agreed, compare_all=compares)
        return Planned(
            items=captured.items,
            tensors=captured.tensors,
            signature=plain,
            agreed=agreed,
            compares=compares,
            placement=placement,
        )
