"""What saving costs a training: time lost per save, and steps per second with regular saves.

Usage: python benchmarks/training_slowdown.py [--quick]

Lost per save = time that the call blocks, waiting before the state changes, and whatever longer the steps take until
the save is durable: the steps around each save are compared with undisturbed ones right before and after it, in one
process, for forward and backward of 0.5, 2 and 10 copies of the state. Steps per second: the GPT of the examples, with
and without saves in stretches that take turns, the ratio with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from children import ChildError, empty_folder, run_ranks
from measuring import bootstrap, progress, tell
from processes import adopt_orphans

BENCHMARK = "training_slowdown"
OURS = "resilient"
PEERS = ("DCP async, thread", "torch_checkpointing", "DCP async, process")
PROGRAM = Path(__file__).with_name("saving_loop.py")
# kind of training; forward and backward, in copies of the state
LOOPS = [(kind, work) for kind in ("dense", "EMA", "LoRA") for work in (0.5, 2.0, 10.0)]
QUICK_LOOPS = [("dense", 0.5), ("dense", 2.0), ("dense", 10.0), ("EMA", 2.0), ("LoRA", 2.0)]
_OF_COPY = 0.02
_PER_TENSOR_S = 5e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller states, fewer loops, fewer peers")
    parser.add_argument("--mib", type=int, help="size of the state of the loops, instead")
    parser.add_argument("--gpt-mib", type=int, help="size of the state of the GPT, instead")
    parser.add_argument("--only", choices=("loops", "gpt"))
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk that is saved to")
    args = parser.parse_args()
    adopt_orphans()
    if args.only != "gpt":
        run_loops(args.folder, args.mib or (128 if args.quick else 664), quick=args.quick)
    if args.only != "loops":
        run_gpt(args.folder, args.gpt_mib or (160 if args.quick else 1536), quick=args.quick)


def run(name: str, options: list[str], folder: Path) -> dict[str, Any] | None:
    """Run one training; return what it measured, or None if a peer failed: then it has no figures."""
    progress(f"{BENCHMARK}: {name} {' '.join(options)}")
    try:
        with empty_folder(folder) as place:
            (report,), _ = run_ranks([str(PROGRAM), name, *options, f"--folder={place}"])
    except ChildError as error:
        if name == OURS:
            raise
        progress(f"{name} is out: {error}")
        return None
    return dict(report)


# --- time lost per save -----------------------------------------------------------------------------------------------


def run_loops(folder: Path, mib: int, *, quick: bool) -> None:
    for kind, work in QUICK_LOOPS if quick else LOOPS:
        options = [f"--kind={kind}", f"--work={work}", f"--mib={mib}", f"--saves={6 if quick else 9}"]
        on = f"{kind}, {mib} MiB, forward and backward {work:g} copies"
        lost = {}
        for name in (OURS, *PEERS[: 1 if quick else 2]):
            report = run(name, options, folder)
            if report is not None:
                lost[name] = tell_loop(f"{name}, {on}", report)
                if name == OURS:
                    tell_limits(f"{name}, {on}", report)
        ours = lost.pop(OURS)
        if lost:
            peer = min(lost, key=lambda name: statistics.median(lost[name]))
            best = statistics.median(lost[peer])
            # A difference: where little is lost, noise makes losses of either sign, and a ratio of them means nothing.
            values = [best - value for value in ours]
            tell(BENCHMARK, f"{OURS}, {on}", f"lost per save less than the best peer ({peer})", "ms", values)


def tell_loop(case: str, report: dict[str, Any]) -> list[float]:
    """Tell the figures of one training; return the milliseconds lost per save, the first one left out."""
    lost, blocked, durable = (_ms(report[name]) for name in ("lost_s", "blocked_s", "durable_s"))
    tell(BENCHMARK, case, "lost, first save", "ms", lost[:1])
    tell(BENCHMARK, case, "lost per save, later ones", "ms", lost[1:])
    tell(BENCHMARK, case, "blocked, first save", "ms", blocked[:1])
    tell(BENCHMARK, case, "blocked, later saves", "ms", blocked[1:])
    tell(BENCHMARK, case, "until durable", "ms", durable[1:])
    tell(BENCHMARK, case, "undisturbed step", "ms", _ms([report["step_s"]]))
    tell(BENCHMARK, case, "copy of the state, one thread", "ms", _ms([report["copied_s"]]))
    if report.get("fence_s"):
        tell(BENCHMARK, case, "waited at the fence", "ms", _ms(report["fence_s"][1:] or report["fence_s"]))
    return lost[1:]


def tell_limits(case: str, report: dict[str, Any]) -> None:
    """Tell what the targets are about: what the call itself may take, and what the first one may."""
    allowed_s = _OF_COPY * report["copied_s"] + _PER_TENSOR_S * report["tensors"]
    first, *later = report["blocked_s"]
    allowed = [value / allowed_s for value in later]
    tell(BENCHMARK, case, "blocked, of what it may be (2 % of a copy + 5 us per tensor)", "ratio", allowed)
    tell(BENCHMARK, case, "first save blocked, of later ones", "ratio", [first / statistics.median(later)])
    tell(BENCHMARK, case, "lost per save, of a copy", "ratio", [v / report["copied_s"] for v in report["lost_s"][1:]])


def _ms(seconds: list[float]) -> list[float]:
    return [1000 * value for value in seconds]


# --- steps per second -------------------------------------------------------------------------------------------------


def run_gpt(folder: Path, mib: int, *, quick: bool) -> None:
    every_s, saves, pairs = (1.5, 2, 7) if quick else (5.0, 2, 7)
    how = [f"--pairs={pairs}", f"--every-s={every_s}", f"--saves-per-stretch={saves}"]
    for name in (OURS, PEERS[0]) if quick else (OURS, *PEERS):
        report = run(name, ["--kind=GPT", f"--mib={mib}", *how], folder)
        if report is not None:
            tell_gpt(f"{name}, GPT, {mib} MiB, a save every {every_s:g} s", report["stretches"])


def tell_gpt(case: str, stretches: list[dict[str, Any]]) -> None:
    """Tell the ratio of the two rates, pair by pair, and the processor seconds that a save adds."""
    pairs = [sorted(pair, key=lambda each: each["saves"]) for pair in zip(stretches[::2], stretches[1::2], strict=True)]
    ratios, rates, trainer, others = [], [], [], []
    for without, saving in pairs:
        rates.append(without["steps"] / without["seconds"])
        ratios.append(saving["steps"] / saving["seconds"] / rates[-1])
        alike = saving["steps"] / without["steps"]
        trainer.append((saving["trainer_cpu_s"] - alike * without["trainer_cpu_s"]) / saving["saves"])
        others.append((saving["other_cpu_s"] - alike * without["other_cpu_s"]) / saving["saves"])
    low, high = bootstrap(ratios)
    tell(BENCHMARK, case, "steps per second without saves", "1/s", rates)
    tell(BENCHMARK, case, "steps per second, of those without saves", "ratio", ratios)
    tell(BENCHMARK, case, "the same, lower end of the 95 % interval", "ratio", [low])
    tell(BENCHMARK, case, "the same, upper end of the 95 % interval", "ratio", [high])
    tell(BENCHMARK, case, "processor time per save, trainer", "s", trainer)
    tell(BENCHMARK, case, "processor time per save, all other processes", "s", others)


if __name__ == "__main__":
    main()
