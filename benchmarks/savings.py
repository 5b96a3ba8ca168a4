"""What compression and references to unchanged data save: time on a slow link, bytes where little has changed.

Usage: python benchmarks/savings.py [--quick]

The link is one of 50 MB/s, by the setting ``max_bandwidth``. The weights are bfloat16 and normally distributed, as
trained ones are; all of them change between two saves, but for those that are frozen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from children import done, empty_folder, ready_steady, run_ranks
from measuring import MIB, progress, tell
from processes import adopt_orphans
from states import State, change, check_equal, like_trained, nbytes_of, some_names

import resilient

BENCHMARK = "savings"
DEADLINE_S = 600.0
LINK, LINK_BYTES_PER_S = "50MB/s", 50e6
_FROZEN = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state, fewer saves")
    parser.add_argument("--mib", type=int, help="size of the state, instead")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk that is saved to")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compress", default="off", help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    parser.add_argument("--frozen", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--saves", type=int, default=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    adopt_orphans()
    if args.child:
        save_again_and_again(args)
        return
    size = f"--mib={args.mib or (128 if args.quick else 512)}"
    tell_slow_link(args.folder, size)
    tell_local_disk(args.folder, size)
    tell_frozen(args.folder, size)


# --- what is told -----------------------------------------------------------------------------------------------------


def tell_slow_link(folder: Path, size: str) -> None:
    """Compare the time until durable with and without compression, over the link."""
    found = {mode: run(folder, size, f"--compress={mode}", f"--link={LINK}") for mode in ("off", "auto")}
    raw_s = statistics.median(found["off"]["durable_s"][1:])
    expected_s = found["off"]["nbytes"] / LINK_BYTES_PER_S
    if not 0.9 * expected_s < raw_s < 1.5 * expected_s:
        raise SystemExit(f"raw bytes took {raw_s:.2f} s over {LINK}, not {expected_s:.2f} s: the link was another one")
    for mode, report in found.items():
        tell_sizes(f"bfloat16 weights over {LINK}, compress={mode}", report)
    faster = [raw_s / value for value in found["auto"]["durable_s"][1:]]
    tell(BENCHMARK, f"bfloat16 weights over {LINK}", "speed with compress=auto, of raw", "ratio", faster)


def tell_local_disk(folder: Path, size: str) -> None:
    """Tell what share of the bytes is written where the disk is faster than the codec."""
    report = run(folder, size, "--compress=auto")
    tell_sizes("bfloat16 weights on the local disk, compress=auto", report)
    share = [value / report["nbytes"] for value in report["stored"][1:]]
    tell(BENCHMARK, "bfloat16 weights on the local disk, compress=auto", "bytes written, of all", "ratio", share)


def tell_frozen(folder: Path, size: str) -> None:
    """Tell what share of a full save is sent when most parameters stay as they are."""
    report = run(folder, size, f"--frozen={_FROZEN}")
    share = [value / report["stored"][0] for value in report["stored"][1:]]
    tell(BENCHMARK, f"{_FROZEN:.0%} of the parameters frozen", "bytes sent, of a full save", "ratio", share)


def tell_sizes(case: str, report: dict[str, Any]) -> None:
    tell(BENCHMARK, case, "until durable", "s", report["durable_s"][1:])
    tell(BENCHMARK, case, "bytes stored", "MiB", [value / MIB for value in report["stored"][1:]])


def run(folder: Path, *options: str) -> dict[str, Any]:
    progress(f"{BENCHMARK}: {' '.join(options)}")
    with empty_folder(folder) as place:
        (report,), _ = run_ranks([__file__, "--child", f"--folder={place}", *options])
    return dict(report)


# --- one run, in a process of its own ---------------------------------------------------------------------------------


def save_again_and_again(args: argparse.Namespace) -> None:
    """Save, change what is not frozen, save again; print times and the bytes that each save has stored."""
    state = like_trained(args.mib * MIB)
    names = sorted(state)
    changing = {name: state[name] for name in names[round(args.frozen * len(names)) :]}
    report: dict[str, Any] = {"nbytes": nbytes_of(state), "durable_s": [], "stored": []}
    settings = {"compress": args.compress} | ({"max_bandwidth": args.link} if args.link else {})
    ready_steady()

    @resilient.train(args.folder, every=10**9, keep=resilient.Keep(last=args.saves + 1), **settings)
    def train(run: resilient.Run) -> None:
        run.track(state=state)
        for turn in run.steps(range(args.saves + 1)):
            if turn > 0:
                one_save(run, args.folder, report)
            run.fence()
            change(changing)

    train()
    done()
    check(args.folder, state)
    print(json.dumps(report))


def one_save(run: resilient.Run, place: Path, report: dict[str, Any]) -> None:
    before = stored_nbytes(place)
    begin_s = time.perf_counter()
    run.save().wait(DEADLINE_S)
    report["durable_s"].append(time.perf_counter() - begin_s)
    report["stored"].append(stored_nbytes(place) - before)


def stored_nbytes(place: Path) -> int:
    """Return the size of all data objects of a run."""
    return sum(path.stat().st_size for path in (place / "data").rglob("*") if path.is_file())


def check(place: Path, state: State) -> None:
    """Compare the newest save, which is that of the end, with the state."""
    newest = resilient.checkpoints(place)[0]
    for name in some_names(state):
        check_equal(name, newest.tensor(f"state.{name}"), state[name])
    verification = newest.verify()
    if not verification.ok:
        raise ValueError(f"what was stored is damaged: {verification}")


if __name__ == "__main__":
    main()
