"""How long after a signal this process lives on, and whether a save fits into that."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient.config import Process, Settings, parse_bandwidth
from resilient.engine.peers import Peers
from resilient.events import Bus, Event, Notice, SaveCommitted
from resilient.state.leaves import Captured
from resilient.state.to_come import state_to_come

USUAL_S: Final = 30.0
"""What torchrun gives, and Kubernetes, if nobody says otherwise."""

_ASSUMED: Final = 200e6
"""Bytes a second that a rank stores, before anything is measured: an object store, or a disk that others use, too."""

_MARGIN_S: Final = 2.0
_FLAG: Final = "--shutdown-timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """``seconds`` from a signal to the end by force, and who says so."""

    seconds: float
    source: str


def grace_of(settings: Settings, process: Process) -> Grace:
    """Return what holds: the shorter one of the setting and of what torchrun was started with; else what is usual.

    A scheduler that gives more does not help where torchrun is in between, and kills after its own time.
    """
    known = [] if process.elastic_id is None else [_torchrun(process)]
    if settings.grace_s is not None:
        known.append(Grace(seconds=settings.grace_s, source="the setting grace_s"))
    return min(known, key=lambda grace: grace.seconds, default=Grace(seconds=USUAL_S, source="assumed, nobody says"))


def _torchrun(process: Process) -> Grace:
    for text, source in (
        (_flag(), f"torchrun's {_FLAG}"),
        (process.shutdown_timeout, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ):
        if text is not None and text.isdecimal():
            return Grace(seconds=float(text), source=source)
    return Grace(seconds=USUAL_S, source="torchrun's default")


class GraceCheck:
    """Says once that a save is not likely to fit into the grace time: at the start, or when a save was measured."""

    def __init__(self, grace: Grace, settings: Settings, peers: Peers, *, launched: bool, bus: Bus) -> None:
        self._grace = grace
        self._limit = settings.max_bandwidth
        self._peers = peers
        self._launched = launched
        self._bus = bus
        self._told = False
        self.predicted_s: float | None = None
        bus.subscribe(self._measure)

    def estimate(self, captured: Captured, items: Mapping[str, object]) -> None:
        """Predict from the size of the state, before the first save."""
        nbytes = state_to_come(items) / self._peers.world_size
        for leaf, local in zip(captured.tensors, captured.locals, strict=True):
            if leaf.alias is None:
                # Of what several ranks hold, each stores a part.
                holders = 1 if leaf.rank is not None else len(leaf.holders or range(self._peers.world_size))
                nbytes += local.numel() * local.element_size() / holders
        speed, known = (_ASSUMED, "assumed") if self._limit is None else (parse_bandwidth(self._limit), "max_bandwidth")
        self._predict(nbytes / speed, f"{nbytes / 1e6:.0f} MB of each rank at {speed / 1e6:.4g} MB/s, {known}")

    def _measure(self, event: Event) -> None:
        if isinstance(event, SaveCommitted):
            self._predict(event.duration_s, f"as that of step {event.step} did")

    def _predict(self, save_s: float, why: str) -> None:
        self.predicted_s = save_s
        if self._told or save_s + _MARGIN_S <= self._grace.seconds:
            return
        self._told = True
        enough = 10 * math.ceil((1.5 * save_s + _MARGIN_S) / 10)
        remedy = (
            f"start torchrun with {_FLAG}={enough}" if self._launched else f"if more is given, say grace_s={enough}"
        )
        self._bus.emit(
            Notice(
                rank=self._peers.rank,
                message=f"a stop may lose steps: a save takes about {save_s:.0f} s ({why}), but after a signal"
                f" this process is ended within {self._grace.seconds:g} s ({self._grace.source}); {remedy}",
            )
        )


def _flag() -> str | None:
    """Return what the process that started this one was told by torchrun's flag."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.replace("_", "-").partition("=")
        if name == _FLAG:
            return value if equals else following
    return None
