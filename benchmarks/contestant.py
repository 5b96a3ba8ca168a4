"""One rank of one contestant of save.py, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist
from children import done, ready_steady
from limits import RawWrites, copy_s
from measuring import GIB, MIB
from peers import CONTESTANTS, Contestant, meet_alone
from processes import adopt_orphans, cpu_s
from states import State, change, dense_state, nbytes_of, some_names
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

THE_MACHINE = "the machine"
_SETTLE_S = 0.3  # what is done right after a save is durable (retention, proofs) is part of its cost


@dataclass(slots=True)
class Report:
    """What a rank measured; ``limits`` (metric, unit, value) instead of saves if it stands for the machine itself."""

    nbytes: int = 0
    blocked_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    limits: list[tuple[str, str, float]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=[THE_MACHINE, *CONTESTANTS])
    parser.add_argument("--mib", type=int, required=True, help="of all ranks together")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    adopt_orphans()
    if args.name == THE_MACHINE:
        report = measure_machine(args.mib * MIB, args.folder)
    else:
        report = take_part(args.name, args.mib * MIB, args.saves, args.folder)
    print(json.dumps(asdict(report)))


def take_part(name: str, nbytes: int, saves: int, folder: Path) -> Report:
    """Save again and again, and read the last one back."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    else:
        meet_alone(name)
    state = make_state(nbytes, ranks)
    contestant = CONTESTANTS[name](state, folder)
    report = Report(nbytes=nbytes_of(state))
    ready_steady()
    for step in range(1, saves + 1):
        change(state)
        one_save(contestant, step, report)
    done()
    contestant.check(saves, some_names(state))
    contestant.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return report


def make_state(nbytes: int, ranks: int) -> State:
    """Make a state of that size, divided between the ranks as FSDP2 does."""
    if ranks == 1:
        return dense_state(nbytes)
    mesh = init_device_mesh("cpu", (ranks,))
    mine = dense_state(nbytes // ranks, seed=dist.get_rank())
    return {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in mine.items()}


def one_save(contestant: Contestant, step: int, report: Report) -> None:
    """Save once, and note what it cost."""
    meet()
    before_s = cpu_s(os.getpid())
    begin_s = time.perf_counter()
    contestant.save(step)
    contestant.fence()
    report.blocked_s.append(time.perf_counter() - begin_s)
    contestant.wait()
    report.durable_s.append(time.perf_counter() - begin_s)
    time.sleep(_SETTLE_S)
    report.cpu_s.append(cpu_s(os.getpid()) - before_s)
    meet()
    if step > 1:
        contestant.forget(step - 1)


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_machine(nbytes: int, folder: Path) -> Report:
    """Measure how fast this machine copies and writes that many bytes."""
    writes = RawWrites(nbytes, folder)
    ready_steady()
    limits = [(f"raw write, {way}", "GiB/s", nbytes / GIB / writes.time_s(way)) for way in writes.ways]
    done()
    writes.close()
    return Report(limits=[*limits, ("copy, one thread", "GiB/s", nbytes / GIB / copy_s(nbytes))])


if __name__ == "__main__":
    main()
