"""What one event costs the thread that reports it, by sink: `python benchmarks/sinks.py`.

Real sinks on one bus: the log (level INFO, into a file), the numbers for Prometheus while they are scraped over HTTP
twice a second and written to a file, and an observer that counts. The events are those of saves and steps, as a run
reports them. Processor time of the reporting thread, so that what else the machine does counts for little.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from resilient import events
from resilient.config import Process
from resilient.observe.logs import LOGGER, show_logs
from resilient.observe.sinks import Sinks

ROUNDS, LEAST_S = 9, 0.2

MIX = (
    *(events.StepsTaken(step=step, steps=10, turn_s=1.0, data_s=0.1, save_s=0.0) for step in range(10, 100, 10)),
    events.SaveStarted(step=90, reason="interval", nbytes=1 << 30, stall_s=0.01),
    events.SaveFenced(step=90, waited_s=0.0),
    events.SaveStaged(step=90, duration_s=0.2),
    events.SavePersisted(step=90, nbytes=1 << 30, sent=1 << 30, cpu_s=0.5, duration_s=2.0),
    events.SaveCommitted(step=90, nbytes=1 << 30, duration_s=2.1),
    events.StepPicture(
        step=90, steps=3, step_s=0.1, compute_s=0.05, exchange_s=0.02, data_s=0.01, optimizer_s=0.01, save_s=0.0
    ),
)


def microseconds(emit: Callable[[events.Event], None]) -> float:
    """Return the median over rounds of the mean time of one event."""
    rounds = []
    for _ in range(ROUNDS):
        count, began = 0, time.thread_time()
        while (spent := time.thread_time() - began) < LEAST_S:
            for event in MIX:
                emit(event)
            count += len(MIX)
        rounds.append(1e6 * spent / count)
    return statistics.median(rounds)


def scraping(port: int, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=9464)
    port = parser.parse_args().port
    with tempfile.TemporaryDirectory() as folder:
        LOGGER.addHandler(logging.FileHandler(Path(folder) / "log"))
        LOGGER.setLevel(logging.INFO)
        seen: list[int] = [0]

        def count(_: events.Event) -> None:
            seen[0] += 1

        cases = {
            "log": Sinks((), None, None),
            "observer": Sinks((count,), None, None),
            "prometheus": Sinks((), port, f"{folder}/r.prom"),
            "all": Sinks((count,), port, f"{folder}/r.prom"),
        }
        for name, sinks in cases.items():
            bus, ended = events.Bus(), threading.Event()
            if name in ("log", "all"):
                show_logs(bus)
            with sinks.attached(bus, Process(), run=folder, rank=0):
                scraper = threading.Thread(target=scraping, args=(port, ended))
                if sinks.metrics_port is not None:
                    scraper.start()
                spent = microseconds(bus.emit)
                ended.set()
                if sinks.metrics_port is not None:
                    scraper.join()
            print(json.dumps({"sinks": name, "us_per_event": round(spent, 2), "events_per_s": round(1e6 / spent)}))


if __name__ == "__main__":
    main()
