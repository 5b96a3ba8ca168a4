"""Runs every benchmark in fresh processes, and ends in a table: what was reached beside what was to be.

Usage: python benchmarks/run_all.py --quick|--full --json OUT [--report docs/benchmarks.md] [--only save memory ...]
       python benchmarks/run_all.py --render OUT --report docs/benchmarks.md

OUT gets one JSON document a line: first what was measured when, where and with what, then the figures, then the
profiles. The rest of the machine should be idle meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measuring import GIB, Figure, progress
from render import render

HERE = Path(__file__).parent
LIMIT_S = 4 * 3600.0
# Each program, and what makes it quick or full.
PROGRAMS = {
    "save": (["--quick"], []),
    "restore": (["--quick"], []),
    "training_slowdown": (["--quick"], []),
    "s3": (["--quick"], []),
    "control_plane": ([], ["--full"]),
    "memory": (["--quick"], []),
    "savings": (["--quick"], []),
    "profiles": (["--quick"], []),
}
PACKAGES = (
    *("resilient-torch", "torch", "numpy", "obstore", "xxhash", "zstandard", "s3fs"),
    *("safetensors", "torch_checkpointing", "torchsnapshot", "s3torchconnector"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true", help="small states, a few minutes")
    size.add_argument("--full", action="store_true", help="1 and 4 GiB, some hours")
    size.add_argument("--render", type=Path, help="only make the report, from what --json wrote")
    parser.add_argument("--json", type=Path, help="where the figures go, one a line")
    parser.add_argument("--report", type=Path, help="where the tables go, as Markdown; else to standard output")
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    args = parser.parse_args()
    if args.render:
        lines = [json.loads(line) for line in args.render.read_text().splitlines()]
    else:
        lines = measure(args.only, quick=args.quick)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    head = lines[0]
    figures = [Figure(**line) for line in lines[1:] if "metric" in line]
    profile = next((line["profile"] for line in lines[1:] if "profile" in line), None)
    text = render(head, figures, profile)
    if args.report:
        args.report.write_text(text)
    else:
        print(text)
    if head["failed"]:
        sys.exit(f"failed: {', '.join(head['failed'])}")


def measure(names: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """Run the programs, one after another; return the lines of the result."""
    begin_s = time.monotonic()
    found: list[dict[str, Any]] = []
    failed = []
    for number, name in enumerate(names, 1):
        progress(f"[{number}/{len(names)}] {name}, after {(time.monotonic() - begin_s) / 60:.1f} min")
        lines = run(name, PROGRAMS[name][0 if quick else 1])
        if lines is None:
            failed.append(name)
        else:
            found += lines
    minutes = (time.monotonic() - begin_s) / 60
    return [{**surroundings(), "size": "quick" if quick else "full", "minutes": minutes, "failed": failed}, *found]


def run(name: str, options: list[str]) -> list[dict[str, Any]] | None:
    """Run one program; return its figures, or None if it failed: what it told until then does not count."""
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "profile"
        if name == "profiles":
            command.append(f"--report={report}")
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            progress(f"{name} failed: {error}")
            return None
        if name == "profiles":
            return [{"profile": report.read_text()}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "metric" in line]


def surroundings() -> dict[str, Any]:
    """Say when, where and with what."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpus()} x {cpu[1] if cpu else platform.machine()}, {gib(memory)} GiB of memory, {kernel()}",
        "versions": versions,
    }


def cpus() -> int:
    return len(re.findall(r"^processor", Path("/proc/cpuinfo").read_text(), re.MULTILINE))


def gib(memory: re.Match[str] | None) -> int:
    return round(int(memory[1]) * 1024 / GIB) if memory else 0


def kernel() -> str:
    return f"{platform.system()} {platform.release().partition('-')[0]}"


if __name__ == "__main__":
    main()
