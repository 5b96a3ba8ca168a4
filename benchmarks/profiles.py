"""Where the time of a save and of a restore goes: the calls of the training thread, and samples of every process.

Usage: python benchmarks/profiles.py [--quick] [--report FILE]

Two states: one of large tensors (1 GiB), one of 20,000 small ones (1 KiB each). The calls are counted by cProfile,
which makes calls of Python slower than they are: its shares count, not its seconds. The samples are taken by py-spy
from outside, 200 a second; what counts are those inside of the package, without its imports.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from children import empty_folder
from measuring import MIB, progress
from processes import adopt_orphans, wait_until_alone
from states import State, change, dense_state, small_tensors

import resilient

DEADLINE_S = 600.0
ROUNDS = 8
_TOP = 14
_RATE = 200
_NOT_OURS = ("(states.py)", "(threading.py)")  # how the state is changed, and waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 MiB, and 4,000 small tensors")
    parser.add_argument("--report", type=Path, help="write the profiles there, as text, not to standard output")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk that is saved to")
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--large-mib", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--small", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    adopt_orphans()
    if args.child:
        work(args)
        return
    mib, small = (128, 4000) if args.quick else (1024, 20_000)
    parts = []
    for what, options in ((f"{mib} MiB", [f"--large-mib={mib}"]), (f"{small:,} small tensors", [f"--small={small}"])):
        with empty_folder(args.folder) as folder:
            for how in WORK:
                progress(f"profiles: {how}, {what}")
                command = [sys.executable, __file__, f"--child={how}", f"--folder={folder}", *options]
                parts.append(
                    f"### {how.capitalize()} of {what}\n\n```text\n{calls(command)}\n\n{samples(command)}\n```\n"
                )
    text = "\n".join(parts)
    if args.report:
        args.report.write_text(text)
    else:
        print(text)


# --- two kinds of profiles --------------------------------------------------------------------------------------------


def calls(command: list[str]) -> str:
    """Return what cProfile counts in the thread that trains."""
    try:
        done = subprocess.run([*command, "--calls"], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    finally:
        wait_until_alone()
    return done.stdout.rstrip()


def samples(command: list[str]) -> str:
    """Return where py-spy finds the processes, each of them for itself, by the innermost frame."""
    folder = Path(command[3].partition("=")[2])
    recorded = folder / "samples.txt"
    spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--subprocesses", "--function", "--format=raw"]
    spy += [f"--rate={_RATE}", f"--output={recorded}", "--"]
    try:
        subprocess.run([*spy, *command], check=True, capture_output=True, timeout=DEADLINE_S)
    finally:
        wait_until_alone()
    return summary(recorded.read_text())


def summary(recorded: str) -> str:
    """Add up stacks ("outer;...;inner count") of the package by process and innermost function."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in recorded.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        ours = [frame for frame in frames if "(resilient/" in frame]
        if ours and "importlib" not in stack and not frames[-1].endswith(_NOT_OURS):
            process = "the writer process" if "resilient.writer" in frames[0] else "the training process"
            inner = ours[-1] if ours[-1] == frames[-1] else f"{ours[-1]} -> {frames[-1]}"
            found[process][inner] += int(count)
    lines = []
    for process, counts in sorted(found.items()):
        total = sum(counts.values())
        lines.append(f"{process}, all threads: at work for {total / _RATE:.1f} s in {ROUNDS} rounds")
        lines += (f"  {count / total:6.1%}  {frame[:105]}" for frame, count in counts.most_common(_TOP))
    return "\n".join(lines)


# --- what is looked at ------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Save, or restore, again and again in this process."""
    state = dense_state(args.large_mib * MIB) if args.large_mib else small_tensors(args.small)
    profile = cProfile.Profile() if args.calls else None
    WORK[args.child](state, args.folder / f"{args.child}-{'calls' if args.calls else 'samples'}", profile)
    if profile is not None:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(_TOP)
        print(f"calls of the training thread, {ROUNDS} times\n" + "\n".join(text.getvalue().strip().splitlines()[2:]))


def save(state: State, place: Path, profile: cProfile.Profile | None) -> None:
    """Save from a training loop; the profile is that of the call and of the fence."""

    @resilient.train(place, every=10**9, keep=resilient.Keep(last=1))
    def train(run: resilient.Run) -> None:
        run.track(state=state)
        for turn in run.steps(range(ROUNDS + 2)):
            if turn > 1 and profile is not None:
                profile.enable()
            if turn > 0:
                handle = run.save()
                run.fence()
            if profile is not None:
                profile.disable()
            if turn > 0:
                handle.wait(DEADLINE_S)
            change(state)

    train()


def restore(state: State, place: Path, profile: cProfile.Profile | None) -> None:
    """Load what is saved first."""
    resilient.save(place, 1, {"state": state}).wait(DEADLINE_S)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    resilient.load(place, {"state": into})
    for _ in range(ROUNDS):
        if profile is not None:
            profile.enable()
        resilient.load(place, {"state": into})
        if profile is not None:
            profile.disable()


WORK: dict[str, Callable[[State, Path, cProfile.Profile | None], None]] = {"save": save, "restore": restore}


if __name__ == "__main__":
    main()
