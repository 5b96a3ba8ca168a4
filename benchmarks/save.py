"""What a save to the local disk costs: time that training waits, time until durable, processor time, memory.

Usage: python benchmarks/save.py [--quick]

Every round starts each contestant in fresh processes, in an order that moves on: a state is made, saved once (the first
save), then changed and saved again and again (the later ones). What the machine can do with the same bytes is measured
in the same rounds. A round without clocks comes first: it warms the disk up and watches the memory. After its last save
each contestant reads tensors back and compares them: else none of its figures count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from children import ChildError, empty_folder, run_ranks
from contestant import THE_MACHINE
from measuring import GIB, MIB, progress, tell
from peers import CONTESTANTS
from processes import adopt_orphans

BENCHMARK = "save"
OURS = "resilient"
QUICK = (OURS, "torch.save", "safetensors", "DCP async, thread", "torch_checkpointing")
_LEFT_S = 0.01
PROGRAM = Path(__file__).with_name("contestant.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB, one rank, fewer rounds and contestants")
    parser.add_argument("--mib", type=int, nargs="*", help="sizes of the state, instead")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks, instead")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="these contestants, and the machine")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--saves", type=int)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    args = parser.parse_args()
    adopt_orphans()
    names = [THE_MACHINE, *(args.only or (QUICK if args.quick else CONTESTANTS))]
    rounds, saves = args.rounds or (3 if args.quick else 5), args.saves or (4 if args.quick else 2)
    for mib in args.mib or ([256] if args.quick else [1024, 4096]):
        for ranks in args.ranks or ([1] if args.quick else [1, 2]):
            Contest(names, mib * MIB, ranks, saves, args.folder).run(rounds)


class Contest:
    """All contestants on one size of state and one number of ranks."""

    def __init__(self, names: list[str], nbytes: int, ranks: int, saves: int, folder: Path) -> None:
        self._names = names
        self._nbytes = nbytes
        self._ranks = ranks
        self._saves = saves
        self._folder = folder
        self._on = f"{nbytes / GIB:g} GiB, {ranks} rank{'s' * (ranks > 1)}"
        self._values: defaultdict[str, dict[tuple[str, str], list[float]]] = defaultdict(dict)

    def run(self, rounds: int) -> None:
        """Take the rounds and tell all figures."""
        for number in range(rounds + 1):
            for place in range(len(self._names)):
                name = self._names[(place + number) % len(self._names)]
                if number == 0 or name in self._values:
                    progress(f"save, {self._on}: round {number} of {rounds}, {name}")
                    self._turn(name, watched=number == 0)
        if not {OURS, THE_MACHINE} <= self._values.keys():
            sys.exit(f"{OURS} has no result: see above")
        for name, metrics in self._values.items():
            for (metric, unit), values in ((key, found) for key, found in metrics.items() if found):
                tell(BENCHMARK, f"{name}, {self._on}", metric, unit, values)
        self._tell_ratios()

    def _turn(self, name: str, *, watched: bool) -> None:
        command = [str(PROGRAM), name, f"--mib={self._nbytes // MIB}", f"--saves={self._saves}"]
        ranks = 1 if name == THE_MACHINE else self._ranks
        try:
            with empty_folder(self._folder) as place:
                reports, peak = run_ranks([*command, f"--folder={place}"], ranks, watched=watched)
        except ChildError as error:
            self._values.pop(name, None)
            progress(f"{name} is out: {error}")
            return
        noted = self._values[name]
        for metric, unit, values in [("memory over the state", "MiB", [peak / MIB])] if watched else figures(reports):
            noted.setdefault((metric, unit), []).extend(values)

    def _tell_ratios(self) -> None:
        """Tell what the targets are about: ours beside the best of the others, from the same rounds."""
        ours = self._values[OURS]
        case = f"{OURS}, {self._on}"
        written = [values for (metric, _), values in self._values[THE_MACHINE].items() if metric.startswith("raw")]
        best = max(map(statistics.median, written))
        for what in ("durable", "durable after the call"):
            speeds = ours[f"{what}, later saves", "GiB/s"]
            tell(BENCHMARK, case, f"{what}, of best raw write", "ratio", [value / best for value in speeds])
        for key in (("processor time", "s/GiB"), ("blocked, later saves", "ms")):
            others = {
                name: statistics.median(metrics[key])
                for name, metrics in self._values.items()
                if name != OURS and key in metrics
            }
            others.pop(THE_MACHINE, None)
            if others:
                peer = min(others, key=others.__getitem__)
                tell(
                    BENCHMARK,
                    case,
                    f"{key[0]}, of best peer's ({peer})",
                    "ratio",
                    [v / others[peer] for v in ours[key]],
                )
        first, later = ours["blocked, first save", "ms"], statistics.median(ours["blocked, later saves", "ms"])
        tell(BENCHMARK, case, "first save blocked, of later ones", "ratio", [value / later for value in first])


def figures(reports: list[dict[str, Any]]) -> list[tuple[str, str, list[float]]]:
    """Turn what the ranks measured into figures: the slowest rank's times, the sum of their processor times."""
    if reports[0]["limits"]:
        return [(metric, unit, [value]) for metric, unit, value in reports[0]["limits"]]
    gib = sum(report["nbytes"] for report in reports) / GIB
    blocked, durable, used = (
        list(zip(*(report[name] for report in reports), strict=True)) for name in ("blocked_s", "durable_s", "cpu_s")
    )
    # What a call that only copies the state leaves to be done; a call that does everything itself leaves nothing.
    after = [max(end) - max(call) for call, end in zip(blocked, durable, strict=True)][1:]
    after = [seconds for seconds in after if seconds > _LEFT_S]
    return [
        ("blocked, first save", "ms", [1000 * max(blocked[0])]),
        ("blocked, later saves", "ms", [1000 * max(each) for each in blocked[1:]]),
        ("durable, first save", "GiB/s", [gib / max(durable[0])]),
        ("durable, later saves", "GiB/s", [gib / max(each) for each in durable[1:]]),
        ("durable after the call, later saves", "GiB/s", [gib / seconds for seconds in after]),
        ("processor time", "s/GiB", [sum(each) / gib for each in used[1:]]),
    ]


if __name__ == "__main__":
    main()
