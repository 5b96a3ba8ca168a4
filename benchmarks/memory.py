"""What saving and restoring take of memory, on top of the state itself, and whether it grows from save to save.

Usage: python benchmarks/memory.py [--quick]

Memory is the proportional set size of the trainer and all its other processes: what they share counts once. Watched
from outside, every 20 ms, from before the run starts until its last save is committed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import done, empty_folder, ready_steady, run_ranks
from measuring import MIB, progress, tell
from processes import adopt_orphans, memory, open_files, shared_memory, threads
from states import State, change, check_equal, dense_state, some_names

import resilient

BENCHMARK = "memory"
DEADLINE_S = 600.0
ALLOWANCE = 200 * MIB
GROWTH_MIB = 16
_SAVES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB and 30 saves, not 1 GiB and 200")
    parser.add_argument("--mib", type=int, help="size of the state, instead")
    parser.add_argument("--saves", type=int, help="so many saves to see growth, instead")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk that is saved to")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    adopt_orphans()
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    mib, saves = args.mib or (256 if args.quick else 1024), args.saves or (30 if args.quick else 200)
    with empty_folder(args.folder) as folder:
        for slots in (1, 2):
            tell_saving(mib, slots, folder / f"slots{slots}")
        tell_restoring(mib, folder / "slots1")
        tell_growth(saves, folder / "growth")


# --- what is told -----------------------------------------------------------------------------------------------------


def tell_saving(mib: int, slots: int, place: Path) -> None:
    _, over = run_part("save", place, f"--mib={mib}", f"--slots={slots}")
    case = f"saving {mib} MiB, {slots} slot{'s' * (slots > 1)}"
    allowed = (slots + 0.05) * mib * MIB + ALLOWANCE
    tell(BENCHMARK, case, "peak over the state", "MiB", [over / MIB])
    tell(BENCHMARK, case, f"peak, of what it may be ({slots}.05 x state + 200 MiB)", "ratio", [over / allowed])


def tell_restoring(mib: int, place: Path) -> None:
    _, over = run_part("restore", place, f"--mib={mib}")
    tell(BENCHMARK, f"restoring {mib} MiB", "peak over the state", "MiB", [over / MIB])


def tell_growth(saves: int, place: Path) -> None:
    grown, _ = run_part("grow", place, f"--saves={saves}")
    case = f"{saves} saves of {GROWTH_MIB} MiB, from the tenth to the last"
    for metric, unit in (("memory", "MiB"), ("open files", "files"), ("threads", "threads"), ("shared memory", "MiB")):
        tell(BENCHMARK, case, f"growth of {metric}", unit, [grown[metric]])


def run_part(part: str, place: Path, *options: str) -> tuple[Any, int]:
    progress(f"{BENCHMARK}: {part} {' '.join(options)}")
    (report,), over = run_ranks([__file__, f"--part={part}", f"--folder={place}", *options], watched=True)
    return report, over


# --- the parts, each in a process of its own --------------------------------------------------------------------------


def save_part(args: argparse.Namespace) -> None:
    """Save a few times without a pause, so that every slot is used."""
    state = dense_state(args.mib * MIB)
    ready_steady()

    @resilient.train(args.folder, every=10**9, staging_slots=args.slots)
    def train(run: resilient.Run) -> None:
        run.track(state=state)
        for turn in run.steps(range(_SAVES + 1)):
            if turn > 0:
                run.save()
            run.fence()
            change(state)

    train()
    done()
    check(args.folder, state)


def restore_part(args: argparse.Namespace) -> None:
    """Restore into a state that is there already."""
    state = dense_state(args.mib * MIB, seed=1)
    ready_steady()
    newest = resilient.load(args.folder, {"state": state})
    done()
    for name in some_names(state):
        check_equal(name, newest.tensor(f"state.{name}"), state[name])


def grow_part(args: argparse.Namespace) -> dict[str, float]:
    """Save again and again; return what is taken at the end and was not after the tenth save."""
    state = dense_state(GROWTH_MIB * MIB)
    ready_steady()
    seen: list[dict[str, float]] = []

    @resilient.train(args.folder, every=10**9, keep=resilient.Keep(last=2))
    def train(run: resilient.Run) -> None:
        run.track(state=state)
        for turn in run.steps(range(args.saves + 1)):
            if turn > 0:
                run.save().wait(DEADLINE_S)
            if turn in (10, args.saves):
                seen.append(taken())
            run.fence()
            change(state)

    train()
    done()
    check(args.folder, state)
    return {metric: seen[-1][metric] - seen[0][metric] for metric in seen[0]}


def taken() -> dict[str, float]:
    """Return what this process and all below it hold now."""
    mine = os.getpid()
    return {
        "memory": memory(mine) / MIB,
        "open files": open_files(mine),
        "threads": threads(mine),
        "shared memory": shared_memory(mine) / MIB,
    }


def check(place: Path, state: State) -> None:
    """Compare the newest save, which is that of the end, with the state."""
    newest = resilient.checkpoints(place)[0]
    for name in some_names(state):
        check_equal(name, newest.tensor(f"state.{name}"), state[name])


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {"save": save_part, "restore": restore_part, "grow": grow_part}


if __name__ == "__main__":
    main()
