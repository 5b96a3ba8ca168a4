"""All sinks of a real run: two ranks under torchrun, scraped while they train, with an observer that breaks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from resilient import events
from resilient.config import Process, Settings
from resilient.observe.sinks import find_sinks
from tests.observe.test_prometheus import Samples, fetch, free_port, scrape

PROGRAM = """
import sys, time
from pathlib import Path
import torch, resilient
torch.manual_seed(0)
from resilient.events import Event

folder = Path(sys.argv[1])
heard = []

def careful(event: Event) -> None:
    heard.append(type(event).__name__)

def broken(event: Event) -> None:
    raise ValueError("no such dashboard")

@resilient.train(folder / "run", every=2, observers=[careful, broken], metrics_port=int(sys.argv[2]),
                 metrics_file=folder / "prom" / "resilient.prom")
def main(run):
    model = torch.nn.Linear(3, 3)
    run.track(model=model)
    for _ in run.steps(range(40)):
        if run.step == 20:
            (folder / f"half-{run.rank}").touch()
            until = time.monotonic() + 60
            while not (folder / "scraped").exists() and time.monotonic() < until:
                time.sleep(0.05)
    return run.rank

(folder / f"heard-{main()}").write_text("\\n".join(heard))
"""


def two_free_ports() -> int:
    while True:
        port = free_port()
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue


def wait_for(*paths: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 100
    while not all(path.exists() for path in paths):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_run_is_shown_by_all_of_its_ranks_and_no_sink_hurts_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "prom").mkdir()
    port = two_free_ports()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    files = [tmp_path / "prom" / f"resilient-{rank}.prom" for rank in (0, 1)]
    with subprocess.Popen(
        [*torchrun, "program.py", str(tmp_path), str(port)],
        cwd=tmp_path,
        env={**os.environ, "TORCH_LOGS": "+resilient"},
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        wait_for(tmp_path / "half-0", tmp_path / "half-1", *files, process=job)
        until = time.monotonic() + 60
        scrapes = [scrape(fetch(port + rank)) for rank in (0, 1)]
        while not all(committed(each) for each in scrapes) and time.monotonic() < until:  # saves end when they end
            time.sleep(0.1)
            scrapes = [scrape(fetch(port + rank)) for rank in (0, 1)]
        (tmp_path / "scraped").touch()
        _, errors = job.communicate(timeout=100)
    assert job.returncode == 0, errors
    url = str(tmp_path / "run")
    for rank, found in enumerate(scrapes):
        common = (("rank", str(rank)), ("run", url))
        assert found["resilient_world_size"][common] == 2
        assert found["resilient_generation"][common] == 1
        assert 0 < found["resilient_saved_step"][common] <= found["resilient_step"][common] <= 20
        assert found["resilient_save_stall_seconds_count"][(*common, ("to", "store"))] >= 1
    # The files of an ended run are no numbers of one that stands still.
    assert list((tmp_path / "prom").iterdir()) == []
    for rank in (0, 1):
        heard = Counter((tmp_path / f"heard-{rank}").read_text().split())
        assert heard["GenerationStarted"] == 1
        assert heard["SaveCommitted"] >= 1
    # TORCH_LOGS works under torchrun: torch's own format, the rank in front, every line once.
    lines = [line for line in errors.splitlines() if "resilient/observe/" in line]
    for rank, prefix in enumerate(("[rank0]:", "[rank1]:")):
        mine = [line.partition("] ")[2] for line in lines if line.startswith(prefix)]
        assert len([line for line in mine if "the observer broken failed" in line]) == 1 + rank  # aloud, and at DEBUG
        assert any("ValueError: no such dashboard" in line for line in mine)
        started = [line for line in mine if line.startswith(("fresh start", "rank 1: fresh start"))]
        assert len(started) == 1
        assert len([line for line in mine if "SaveStaged(" in line]) >= 1


def committed(found: Samples) -> bool:
    return any(("outcome", "committed") in key and value >= 1 for key, value in found["resilient_saves_total"].items())


def test_a_port_that_is_taken_is_told_and_nothing_else(tmp_path: Path) -> None:
    bus, seen = events.Bus(), list[events.Event]()
    bus.subscribe(seen.append)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        sinks = find_sinks(Settings(metrics_port=port, metrics_file=str(tmp_path / "r.prom")))
        with sinks.attached(bus, Process(), run="u", rank=0):
            until = time.monotonic() + 20
            while not (tmp_path / "r-0.prom").exists():  # the other way works nevertheless
                assert time.monotonic() < until
                time.sleep(0.01)
    assert [event.message for event in seen if isinstance(event, events.Notice)] == [
        f"no metrics on port {port}, training goes on: Address already in use"
    ]


def test_ranks_of_a_program_that_starts_them_itself_do_not_share_a_port(tmp_path: Path) -> None:
    bus = events.Bus()
    port = free_port()
    with find_sinks(Settings(metrics_port=port)).attached(bus, Process(), run="u", rank=2):
        assert "resilient_hung" in fetch(port + 2)


def test_a_sink_that_nobody_asked_for_costs_no_import() -> None:
    program = (
        "import sys; from resilient.config import Settings; from resilient.observe.sinks import find_sinks;"
        "find_sinks(Settings()); print('prometheus_client' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]
