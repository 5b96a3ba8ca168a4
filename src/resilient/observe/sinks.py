"""Where the events of a run go, besides the log: to Prometheus, and to observers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from resilient.config import Process, Settings
from resilient.events import Bus, Notice
from resilient.observe import prometheus
from resilient.observe.hook import Guarded, Observer, find_observers
from resilient.observe.logs import LOGGER
from resilient.observe.measures import Measures


@dataclass(frozen=True, slots=True)
class Sinks:
    """What a run wants to be shown by, found to be there."""

    observers: tuple[Observer, ...]
    metrics_port: int | None
    metrics_file: str | None

    @contextmanager
    def attached(self, bus: Bus, process: Process, *, run: str, rank: int) -> Iterator[None]:
        """Hand the events of ``bus`` to all of them until the end. What cannot be had is told, and no error.

        Args:
            bus: of this rank.
            process: what the launcher says about it.
            run: the URL of the run.
            rank: the global rank.
        """
        # A program that makes its ranks itself says nothing of local ones.
        local_rank = process.local_rank if process.rank == rank else rank
        say = partial(_say, bus, rank)
        with ExitStack() as closing:
            for observer in self.observers:
                closing.callback(bus.subscribe(Guarded(observer, say)))
            if self.metrics_port is not None or self.metrics_file is not None:
                measures = Measures()
                closing.callback(bus.subscribe(measures))
                exposition = prometheus.Exposition(measures, run=run, rank=rank)
                if self.metrics_port is not None:
                    _serve(exposition, self.metrics_port + local_rank, closing, say)
                if self.metrics_file is not None:
                    path = prometheus.file_for(self.metrics_file, rank=rank, local_rank=local_rank)
                    file = prometheus.TextFile(exposition, path, partial(_unwritten, path, say))
                    closing.callback(file.close)
            yield


def find_sinks(settings: Settings) -> Sinks:
    """Return what the settings name.

    Raises:
        UsageError: kind ``missing-extra`` or ``invalid-setting``: something that they name is not there.
    """
    if settings.metrics_port is not None or settings.metrics_file is not None:
        prometheus.require()
    return Sinks(find_observers(settings.observers), settings.metrics_port, settings.metrics_file)


def _serve(exposition: prometheus.Exposition, port: int, closing: ExitStack, say: partial[None]) -> None:
    try:
        closing.callback(prometheus.Server(exposition, port).close)
    except (OSError, OverflowError) as error:  # a number beyond those of ports overflows
        say(f"no metrics on port {port}, training goes on: {_why(error)}")


def _unwritten(path: Path, say: partial[None], error: OSError) -> None:
    say(f"no metrics in {path}, training goes on: {_why(error)}")


def _why(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return str(error) if number is None else os.strerror(number)


def _say(bus: Bus, rank: int, message: str) -> None:
    if rank != 0:  # where the log shows notices of other ranks to those alone who ask for everything
        LOGGER.warning("rank %d: %s", rank, message)
    bus.emit(Notice(rank=rank, message=message))
