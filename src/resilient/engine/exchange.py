"""Filling tensors that all ranks hold alike: each reads a part from the store and passes it on, where that is faster.

N replicas that each read everything ask N times of the store what is there once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from resilient.catalog.contents import Contents
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.engine.bounce import Bounce
from resilient.engine.peers import Peers
from resilient.engine.read import THREADS, Filling, fill
from resilient.engine.read_plan import ReadPlan, plan_reads
from resilient.engine.spans import Span
from resilient.format.digest import digest
from resilient.policy.exchange import LEAST_NBYTES, exchange_pays
from resilient.state.prepare import Target
from resilient.store.base import Store

_FAILED, _READ = 0, 1
_NO: Final = b""


def fill_together(
    store: Store,
    manifest: Contents,
    targets: Sequence[Target],
    peers: Peers,
    timeout_s: float,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Do what `fill` does, on all ranks: every rank must call it, when all of them are alive.

    If all want the same bytes, they read a part each and pass it on, once; when they have seen what both take, they go
    on like that or each on its own. Return the bytes that this rank read from the store.

    A rank that fails raises, and the others return although not everything is there: the caller has to tell them.

    Raises:
        CorruptError: as `fill`.
        PeerError: some ranks did not say in time what they want.
    """
    if peers.world_size == 1:
        return fill(store, manifest, targets)
    failed: Exception | None = None
    plan, wanted = None, _NO
    try:
        # In units, so that no span depends on where this rank's tensors happen to lie.
        unit_nbytes = max(store.capabilities.unit_nbytes, mmap.PAGESIZE)
        plan = plan_reads(manifest, targets, replace(store.capabilities, unit_nbytes=unit_nbytes))
        wanted = _signature(plan) if plan.total_nbytes >= LEAST_NBYTES and _can_pass_on() else _NO
    except Exception as error:  # noqa: BLE001 -- boundary: the others wait for a word about this rank's plan
        failed = error
    answers = set(peers.gather(peers.numbered("reads"), wanted, timeout_s))
    if failed is not None:
        raise failed
    if plan is None or wanted == _NO or len(answers) > 1:
        return fill(store, manifest, targets)
    with closing(Filling(store, manifest, targets, plan)) as filling:
        return _Exchange(filling, plan.spans, peers, timeout_s, clock).run()


def _can_pass_on() -> bool:
    """Say whether the job's own process group takes what lies in memory."""
    return dist.is_initialized() and "cpu:gloo" in str(dist.get_backend_config())


def _signature(plan: ReadPlan) -> bytes:
    """Return a digest of what is read, in which order: equal on two ranks if and only if they read the same."""
    spans = msgspec.msgpack.encode([(span.start, span.nbytes, span.first, span.end) for span in plan.spans])
    return digest(b"".join([spans, plan.rows.places.object.tobytes(), *plan.digest]))


class _Exchange:
    """Turns in which each rank reads some spans and gets those of the others.

    Each part goes with a mark that says whether its rank has failed so far. All ranks see the same marks, so all of
    them stop after the same turn, and none waits in a collective for one that has left.
    """

    def __init__(self, filling: Filling, spans: Sequence[Span], peers: Peers, timeout_s: float, clock: Clock) -> None:
        self._filling = filling
        self._spans = spans
        self._peers = peers
        self._timeout_s = timeout_s
        self._clock = clock
        *self._own, self._others = (Bounce(()) for _ in range(THREADS + 1))
        self._error: Exception | None = None

    def run(self) -> int:
        """Take turns until everything is there or somebody has failed; return the bytes that this rank has read."""
        nbytes = 0
        per_turn = THREADS * self._peers.world_size
        for first in range(0, len(self._spans), per_turn):
            turn = self._spans[first : first + per_turn]
            begin_s = self._clock.monotonic()
            mine = turn[THREADS * self._peers.rank :][:THREADS]
            parts = self._read(mine)
            nbytes += sum(span.nbytes for span in mine)
            read_s = self._clock.monotonic() - begin_s
            if not self._pass_on(turn, parts):
                break
            pass_on_s = self._clock.monotonic() - begin_s - read_s
            if first == 0 and not self._goes_on(read_s, pass_on_s):
                rest = self._spans[len(turn) :]
                if self._error is None:
                    self._filling.read_all(rest)
                nbytes += sum(span.nbytes for span in rest)
                break
        if self._error is not None:
            raise self._error
        return nbytes

    def _read(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Read this rank's spans of a turn; return for each its stored bytes and the mark."""
        parts = [bounce.take("part", span.nbytes + 1) for bounce, span in zip(self._own, spans, strict=False)]

        def read(span: Span, part: torch.Tensor) -> None:
            try:
                self._filling.read(span, part[:-1].numpy().data)
            except Exception as error:  # noqa: BLE001 -- boundary: the others wait for this rank in a collective
                self._error = self._error or error

        with ThreadPoolExecutor(THREADS, thread_name_prefix="resilient-read") as pool:
            list(pool.map(read, spans, parts))
        for part in parts:
            part[-1] = _READ if self._error is None else _FAILED
        return parts

    def _pass_on(self, turn: Sequence[Span], mine: list[torch.Tensor]) -> bool:
        """Give the others this rank's parts and take theirs; say whether nobody has failed."""
        all_well = True
        for number, span in enumerate(turn):
            owner, index = divmod(number, THREADS)
            part = mine[index] if owner == self._peers.rank else self._others.take("part", span.nbytes + 1)
            dist.broadcast(part, src=owner)
            if part[-1] == _FAILED:
                all_well = False
            elif self._error is None:
                self._accept(span, part[:-1])
        return all_well

    def _accept(self, span: Span, part: torch.Tensor) -> None:
        try:
            with self._filling.bounce() as bounce:
                self._filling.accept(span, part.numpy().data, bounce)
                bounce.settle()  # the part's own memory is used again at once
        except Exception as error:  # noqa: BLE001 -- boundary: the others wait for this rank in a collective
            self._error = error

    def _goes_on(self, read_s: float, pass_on_s: float) -> bool:
        mine = msgspec.msgpack.encode((read_s, pass_on_s))
        answers = self._peers.gather(self._peers.numbered("exchange"), mine, self._timeout_s)
        taken = [msgspec.msgpack.decode(answer, type=tuple[float, float]) for answer in answers]
        return exchange_pays([read for read, _ in taken], [passed for _, passed in taken])
