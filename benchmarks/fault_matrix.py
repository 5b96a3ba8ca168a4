"""The same faults done to resilient and to its peers, with real processes, kills, disks and an S3 server.

Usage: python benchmarks/fault_matrix.py [--quick] [--only SYSTEM ...] [--faults FAULT ...] [--report FILE]
       python benchmarks/fault_matrix.py --render LINES --report docs/fault-matrix.md

Each cell is measured in fresh processes in a fresh place, two ranks with a gloo group; one JSON line each on standard
output. Ends with 1 if resilient does not hold in a cell, and with 2 if a cell of resilient could not be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fault_cell import Cell, Outcome, Setting, Verdict
from fault_crew import CrewError
from fault_report import render
from fault_systems import SYSTEMS
from faults import FAULTS
from measuring import progress
from processes import adopt_orphans
from run_all import surroundings

from tests.s3_server import running_server

BENCHMARK = "fault_matrix"
OURS = "resilient"
_STORE_FAULTS = {"store away", "expired"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small states, fewer repetitions, short outages")
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=20261201, help="of the random moments")
    parser.add_argument("--report", type=Path, help="where the table goes, as Markdown")
    parser.add_argument("--render", type=Path, help="only make the report, from what was printed before")
    parser.add_argument("--folder", type=Path, default=Path("build/faults"), help="where the systems save")
    args = parser.parse_args()
    if args.render:
        lines = [json.loads(line) for line in args.render.read_text().splitlines() if line.startswith("{")]
    else:
        adopt_orphans()
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # ranks and servers are ended then, too
        head = {"benchmark": BENCHMARK, **surroundings(), "size": "quick" if args.quick else "full", "seed": args.seed}
        print(json.dumps(head), flush=True)
        lines = [head]
        for line in measure(args.only, args.faults, args.folder, quick=args.quick, seed=args.seed):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if args.report:
        args.report.write_text(render(lines))
    bad = {line["outcome"] for line in lines if line.get("system") == OURS} - {Outcome.HOLDS, Outcome.NOT_APPLICABLE}
    if bad:
        sys.exit(2 if bad == {Outcome.NOT_MEASURED} else 1)


def measure(names: list[str], faults: list[str], folder: Path, *, quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Do each fault to each system; yield a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))).resolve()
        server = stack.enter_context(running_server(own / "s3")) if _STORE_FAULTS & set(faults) else None
        setting = Setting(
            mib=8 if quick else 40,
            tries=1 if quick else 3,
            random_kills=3 if quick else 10,
            outage_s=5 if quick else 30,
            seed=seed,
            server=server,
        )
        for number, fault in enumerate(faults):
            for system in names:
                begin_s = time.monotonic()
                verdict = measured(system, fault, own / f"{number}-{list(SYSTEMS).index(system)}", setting)
                progress(f"{fault}, {system}: {verdict.outcome} ({time.monotonic() - begin_s:.0f} s)")
                yield {
                    "benchmark": BENCHMARK,
                    "fault": FAULTS[fault][0],
                    "system": system,
                    "outcome": verdict.outcome,
                    "detail": re.sub(rf"{re.escape(str(own))}|/tmp/resilient-full-\w+", "…", verdict.detail),
                }


def measured(system: str, fault: str, folder: Path, setting: Setting) -> Verdict:
    """Do one fault to one system."""
    needs = SYSTEMS[system].needs
    if needs is not None and importlib.util.find_spec(needs) is None:
        return Verdict(outcome=Outcome.NOT_INSTALLED, detail=f"{needs} cannot be imported")
    cell = Cell(system, folder, setting, fault)
    try:
        return FAULTS[fault][1](cell)
    except CrewError as error:
        return Verdict(outcome=Outcome.NOT_MEASURED, detail=f"before the fault: {error}")
    except Exception as error:  # noqa: BLE001 -- boundary: one cell that cannot be measured leaves the others
        traceback.print_exc()
        return Verdict(outcome=Outcome.NOT_MEASURED, detail=f"{type(error).__name__}: {error}")
    finally:
        cell.close()


if __name__ == "__main__":
    main()
