"""The numbers of a rank where Prometheus finds them: over HTTP, or in a file for the node exporter."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.errors import ErrorKind, UsageError
from resilient.observe.measures import Key, Measures
from resilient.observe.names import BUCKETS_S, COMMON, METRICS, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

T = TypeVar("T")

_WRITE_EVERY_S: Final = 5.0
_POLL_S: Final = 0.1
_REQUEST_S: Final = 10.0


def require() -> None:
    """See that the package is there that speaks to Prometheus.

    Raises:
        UsageError: kind ``missing-extra``.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "metrics_port and metrics_file need the package prometheus-client, which is missing here",
            kind=ErrorKind.MISSING_EXTRA,
            hint='pip install "resilient-torch[prometheus]"',
        )


class Exposition:
    """A collector of `prometheus_client`, in a registry of its own: the program's registry is the program's."""

    def __init__(self, measures: Measures, *, run: str, rank: int) -> None:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 -- an extra

        self._measures = measures
        self._common = [run, str(rank)]
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Family]:
        """Yield every metric of which something is known."""
        from prometheus_client import metrics_core as core  # noqa: PLC0415 -- an extra

        reading = self._measures.read()
        for metric in METRICS:
            labels = [*COMMON, *metric.labels]
            if metric.kind is Kind.HISTOGRAM:
                histograms = core.HistogramMetricFamily(metric.name, metric.about, labels=labels)
                for values, histogram in _of(metric, reading.histograms):
                    bounds = zip((*map(str, BUCKETS_S), "+Inf"), accumulate(histogram.counts), strict=True)
                    histograms.add_metric([*self._common, *values], list(bounds), histogram.total_s)
                yield histograms
                continue
            family = core.GaugeMetricFamily if metric.kind is Kind.GAUGE else core.CounterMetricFamily
            numbers = family(metric.name, metric.about, labels=labels)
            for values, number in _of(metric, reading.values):
                numbers.add_metric([*self._common, *values], number)
            yield numbers


class _Answering(ThreadingHTTPServer):
    """A server that is silent about clients that went away: a scrape that is broken off is no fault of the training."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print what went wrong, as the base does, unless it was the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # stubs name more than is handed on


class Server:
    """Answers scrapes on a port of this host until `close`; in threads of its own."""

    def __init__(self, exposition: Exposition, port: int) -> None:
        """Listen on every address of the host.

        Raises:
            OSError: the port is taken, or none that this process may have.
        """
        from prometheus_client import MetricsHandler  # noqa: PLC0415 -- an extra

        # A client that stalls in the middle of a request must not keep a thread for ever.
        handler = type("_Handler", (MetricsHandler,), {"registry": exposition.registry, "timeout": _REQUEST_S})
        # Bound here: binding by http.server asks the name service for this host, which may take seconds.
        self._server = _Answering(("", port), handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = _listen(port)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="resilient-metrics-port", daemon=True
        )
        self._thread.start()
        # Forked loader workers must not keep the port of a trainer that is gone: its next life wants it.
        _close_in_children(self._server.socket)

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_S)


class TextFile:
    """Writes a file every five seconds, whole or not at all, until `close`, which removes it."""

    def __init__(self, exposition: Exposition, path: Path, failed: Callable[[OSError], None]) -> None:
        """``failed`` is told, once, if the file cannot be written; later ones are tried nevertheless."""
        self._exposition = exposition
        self._path = path
        self._failed = failed
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="resilient-metrics-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the file: numbers of a run that has ended are not to be taken for those of one that stands still."""
        self._ended.set()
        self._thread.join(_REQUEST_S)
        with suppress(OSError):  # told already, if it could never be written
            self._path.unlink(missing_ok=True)

    def _live(self) -> None:
        while True:
            try:
                self._write()
            except OSError as error:
                if not self._told:
                    self._told = True
                    self._failed(error)
            if self._ended.wait(_WRITE_EVERY_S):
                return

    def _write(self) -> None:
        from prometheus_client import generate_latest  # noqa: PLC0415 -- an extra

        part = self._path.with_name(f".{self._path.name}.part")  # not *.prom: the node exporter reads all of those
        part.write_bytes(generate_latest(self._exposition.registry))
        part.replace(self._path)


def file_for(pattern: str, *, rank: int, local_rank: int) -> Path:
    """Return the file of one rank.

    ``{rank}`` and ``{local_rank}`` in ``pattern`` are replaced; where neither is, the local rank goes before the
    suffix. Not the global one: after a re-formation, the node would keep the files of ranks that are elsewhere now.
    """
    if "{rank}" not in pattern and "{local_rank}" not in pattern:
        pattern = f"{pattern.removesuffix('.prom')}-{{local_rank}}.prom"
    return Path(pattern.replace("{rank}", str(rank)).replace("{local_rank}", str(local_rank))).expanduser()


def _of(metric: Metric, found: Mapping[Key, T]) -> Iterator[tuple[tuple[str, ...], T]]:
    return ((labels, each) for (name, labels), each in found.items() if name == metric.name)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off; if the port is taken, that is found again below
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _close_in_children(listening: socket.socket) -> None:
    reference = weakref.ref(listening)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    os.register_at_fork(after_in_child=close)
