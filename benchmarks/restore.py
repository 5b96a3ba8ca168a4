"""What a restore from the local disk costs, cold and warm, on as many ranks as saved and on others.

Usage: python benchmarks/restore.py [--quick]

Every contestant restores a state again and again in one process a rank, in an order that moves on, into tensors that
are there and were touched (`torch.load` and safetensors make their own); the best raw read of the same files is taken
in the same rounds. Cold: the files are dropped from the page cache before each turn; warm: read into it. The first
round is not counted. Afterwards tensors are compared: else none of a contestant's figures count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from children import done, empty_folder, ready_steady, run_ranks
from measuring import MIB, progress, tell, timed
from processes import adopt_orphans
from raw_reads import RawReads, files_of, make_cold, make_warm
from states import State, check_equal, dense_state, some_names
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import resilient

BENCHMARK = "restore"
OURS = "resilient"
RAW = "raw read"
LAYOUTS = ((1, 1), (2, 1), (1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 GiB only")
    parser.add_argument("--mib", type=int, nargs="*", help="sizes of the state, instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--part", choices=["save", "restore"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part = save_all if args.part == "save" else restore_all
        print(json.dumps(part(args)))
        return
    adopt_orphans()
    for mib in args.mib or ([1024] if args.quick else [1024, 4096]):
        for saved_on, ranks in LAYOUTS:
            contest(mib, saved_on, ranks, args.rounds, args.folder)


def contest(mib: int, saved_on: int, ranks: int, rounds: int, folder: Path) -> None:
    """Save once, restore again and again, and tell the figures."""
    on = f"{mib / 1024:g} GiB, saved on {saved_on}, restored on {ranks}"
    progress(f"restore, {on}: {rounds} rounds")
    command = [__file__, f"--mib={mib}", f"--rounds={rounds}"]
    with empty_folder(folder) as place:
        run_ranks([*command, "--part=save", f"--folder={place}"], saved_on)
        reports, _ = run_ranks([*command, "--part=restore", f"--folder={place}"], ranks)
    speeds = {
        case: [mib / 1024 / max(turn) for turn in zip(*(report[case] for report in reports), strict=True)]
        for case in reports[0]
    }
    for case, values in speeds.items():
        tell(BENCHMARK, f"{case}, {on}", "speed", "GiB/s", values)
    for how in ("cold", "warm"):
        best = max(statistics.median(values) for case, values in speeds.items() if case.startswith(f"{how}, {RAW}"))
        ours = speeds[f"{how}, {OURS}"]
        tell(BENCHMARK, f"{how}, {OURS}, {on}", "of best raw read", "ratio", [value / best for value in ours])


def save_all(args: argparse.Namespace) -> None:
    """Save one state in the way of every contestant."""
    state = make_state(args.mib[0] * MIB, join())
    resilient.save(args.folder / OURS, 1, {"state": state}).wait(600)
    dcp.save(state, checkpoint_id=args.folder / "DCP", no_dist=not dist.is_initialized())
    if not dist.is_initialized():
        from safetensors.torch import save_file

        torch.save(state, args.folder / "torch.load")
        save_file(state, args.folder / "safetensors")
    ready_steady()
    done()
    leave()


def restore_all(args: argparse.Namespace) -> dict[str, list[float]]:
    """Restore with every contestant, cold and warm; return the seconds of each turn."""
    ranks = join()
    into = {name: tensor.zero_() for name, tensor in make_state(args.mib[0] * MIB, ranks).items()}
    saved = dense_state(args.mib[0] * MIB)
    expected = {name: own_part(saved[name]) for name in some_names(into)}
    del saved
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    turns = contestants(args.folder, into)
    ready_steady()
    for number in range(args.rounds + 1):
        for place in range(len(turns)):
            name, work, files = turns[(place + number) % len(turns)]
            for how, make in (("cold", make_cold), ("warm", make_warm)):
                take_turn(work, files, make, seconds[f"{how}, {name}"])
            if name == OURS:
                for each, part in expected.items():
                    check_equal(each, local(into[each]), part)
                    local(into[each]).zero_()
    done()
    leave()
    return {case: values[1:] for case, values in seconds.items()}


def contestants(folder: Path, into: State) -> list[tuple[str, Callable[[], object], list[Path]]]:
    """Return the name, the work and the files of each."""
    ours = files_of(folder / OURS)
    data = [path for path in ours if path.stat().st_size >= MIB]
    raw = RawReads(data, *((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)))
    no_dist = not dist.is_initialized()
    found: list[tuple[str, Callable[[], object], list[Path]]] = [
        (OURS, lambda: resilient.load(folder / OURS, {"state": into}), ours),
        ("DCP", lambda: dcp.load(into, checkpoint_id=folder / "DCP", no_dist=no_dist), files_of(folder / "DCP")),
        *((f"{RAW}, {way}", work, data) for way, work in raw.ways.items()),
    ]
    if (folder / "torch.load").exists() and no_dist:
        from safetensors.torch import load_file

        one, two = folder / "torch.load", folder / "safetensors"
        found += [("torch.load", lambda: torch.load(one, weights_only=True), [one])]
        found += [("safetensors", lambda: [each.clone() for each in load_file(two).values()], [two])]
    return found


def take_turn(
    work: Callable[[], object], files: list[Path], make: Callable[[list[Path]], None], seconds: list[float]
) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        make(files)
    meet()
    seconds.append(timed(work))
    meet()


def make_state(nbytes: int, ranks: int) -> State:
    """Make the state of that size, divided between the ranks as FSDP2 does."""
    if ranks == 1:
        return dense_state(nbytes)
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: DTensor.from_local(own_part(whole), mesh, [Shard(0)]) for name, whole in dense_state(nbytes).items()}


def own_part(whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone() if dist.is_initialized() else whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def join() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    return ranks


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
