"""What it takes to commit the save of a large job, and to plan a restore from it, without any tensor.

Usage: python benchmarks/control_plane.py [--full]

Every rank of a mesh has 1,000 tensors: most are cut along both dimensions, some along one, a few are replicas, and no
cut is even. Their receipts lie in a store that takes 50 ms for each request. One committer reads, proves and commits
them; then one rank of a job of half the size, and one of a job whose layout has nothing to do with that one, find out
what they have to read. DCP plans the same shards beside it, from plans that it has gathered already.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import MIB, progress, tell

from resilient.catalog.commit import try_commit
from resilient.catalog.contents import open_manifest
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, NotFoundError
from resilient.format import values
from resilient.format.box import Box
from resilient.format.chunks import NOT_HERE, Boxes, Chunks, Places
from resilient.format.columns import join_table, pack_boxes
from resilient.format.documents import Commit, Item, Object, Tensor, Value
from resilient.format.layout import Attempt
from resilient.format.receipts import PackedReceipt, pack_structure, pack_values, seal_receipt
from resilient.store.memory import MemoryStore

BENCHMARK = "control plane"
ATTEMPT = Attempt(step=1000, generation=1, nonce="0123456789abcdef")
LATENCY_S = 0.05
TENSORS = 1000
ROUNDS = 5
_LISTED_AT_ONCE = 1000
_BOTH, _FIRST, _SECOND, _REPLICA = range(4)
_KIND_OF = np.array([_BOTH] * 14 + [_FIRST] * 4 + [_SECOND, _REPLICA])


@dataclass(frozen=True, slots=True)
class Job:
    """A mesh of ranks, and how it holds the tensors; ``world_size`` is a power of two."""

    world_size: int

    @property
    def mesh(self) -> tuple[int, int]:
        columns = 1 << (self.world_size.bit_length() - 1) // 2
        return self.world_size // columns, columns

    def parts(self, rank: int, shapes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where a rank's part of each tensor begins and ends."""
        rows, columns = self.mesh
        kinds = kinds_of(len(shapes))
        count = np.ones((len(shapes), 2), np.int64)
        index = np.zeros((len(shapes), 2), np.int64)
        count[kinds == _BOTH] = rows, columns
        index[kinds == _BOTH] = rank // columns, rank % columns
        count[kinds == _FIRST, 0] = count[kinds == _SECOND, 1] = self.world_size
        index[kinds == _FIRST, 0] = index[kinds == _SECOND, 1] = rank
        return index * shapes // count, (index + 1) * shapes // count


def kinds_of(tensors: int) -> npt.NDArray[np.int64]:
    return np.resize(_KIND_OF, tensors)


def shapes_of(world_size: int, tensors: int) -> npt.NDArray[np.int64]:
    """Return shapes that no mesh divides evenly, and that are large enough for every rank to have a part."""
    number = np.arange(tensors)
    return np.stack([2 * world_size + number % 37 + 1, 2 * world_size + number % 23 + 1], axis=1)


class Ranks:
    """Makes the receipts of a job; what is the same on all ranks is made once, as writers do from save to save."""

    def __init__(self, world_size: int, tensors: int) -> None:
        self._world_size = world_size
        self._shapes, self._kinds = shapes_of(world_size, tensors), kinds_of(tensors)
        items = (Item("model", "module"), Item("rng", "mapping", per_rank=True))
        described = [
            Tensor("model", f"layers.{number}.weight", ("layers", number, "weight"), "float32", tuple(shape))
            for number, shape in enumerate(self._shapes.tolist())
        ]
        described.append(Tensor("rng", "state", ("state",), "uint8", (16, 1), 0))
        self._structure = pack_structure(0, items, described, self._values(0))
        self._tensor = np.arange(tensors + 1, dtype=np.int32)
        self._ndim = np.full(tensors + 1, 2, np.uint8)

    def receipt(self, rank: int) -> bytes:
        """Return what a rank holds and stores."""
        begin, end = Job(self._world_size).parts(rank, self._shapes)
        rows = len(self._tensor)
        nbytes = np.append(4 * np.prod(end - begin, axis=1), 16)
        stored = np.append((self._kinds != _REPLICA) | (self._tensor[:-1] % self._world_size == rank), True)
        replica = np.append(self._kinds == _REPLICA, False)
        noise = np.random.default_rng(rank).integers(0, 256, (rows, 16), np.uint8)
        boxes = Boxes(
            tensor=self._tensor,
            ndim=self._ndim,
            offset=np.vstack([begin, [[0, 0]]]),
            size=np.vstack([end - begin, [[16, 1]]]),
        )
        places = Places(
            object=np.where(stored, 0, NOT_HERE).astype(np.int32),
            start=np.where(stored, np.cumsum(nbytes * stored) - nbytes, 0),
            nbytes=nbytes,
            codec=np.zeros(rows, np.uint8),
            digest=np.where(replica[:, None], 7, noise).astype(np.uint8),
            digested=np.ones(rows, bool),
        )
        shared, own = pack_values(self._values(rank))
        packed = PackedReceipt(
            step=ATTEMPT.step,
            generation=ATTEMPT.generation,
            nonce=ATTEMPT.nonce,
            rank=rank,
            world_size=self._world_size,
            structure=self._structure,
            shared=shared,
            own=own,
            objects=(Object(ATTEMPT.data(rank, 0), int((nbytes * stored).sum())),),
            chunks=join_table(pack_boxes(boxes), places),
        )
        return seal_receipt(packed)

    def _values(self, rank: int) -> tuple[Value, ...]:
        step = Value("model", "step", ("step",), values.encode(ATTEMPT.step))
        return step, Value("rng", "seed", ("seed",), values.encode(rank), rank)


def write_receipts(folder: Path, world_size: int, tensors: int, ranks: range) -> None:
    """Write the receipts of some ranks into one file, and their lengths into another."""
    making = Ranks(world_size, tensors)
    with (folder / f"receipts-{ranks.start:06d}").open("wb") as file:
        nbytes = [file.write(making.receipt(rank)) for rank in ranks]
    (folder / f"lengths-{ranks.start:06d}").write_text(json.dumps(nbytes))


class DistantStore(MemoryStore):
    """Memory behind a network; the receipts come from files, so that they take no memory of the committer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._receipts: dict[str, tuple[int, int, int]] = {}  # file, start, bytes
        self._lock_counts = threading.Lock()
        self.requests = self.nbytes_read = 0
        for path in sorted(folder.glob("receipts-*")):
            file = os.open(path, os.O_RDONLY)  # not mapped: what is mapped counts as memory of this process
            start = 0
            for nbytes in json.loads(path.with_name(path.name.replace("receipts", "lengths")).read_text()):
                self._receipts[ATTEMPT.receipt(len(self._receipts))] = (file, start, nbytes)
                start += nbytes

    def get(self, key: str) -> bytes:
        self._travel()
        if key not in self._receipts:
            return super().get(key)
        file, start, nbytes = self._receipts[key]
        return os.pread(file, nbytes, start)

    def create(self, key: str, data: bytes) -> bool:
        self._travel()
        return super().create(key, data)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._travel()
        found = self._objects.get(key)
        if found is None:
            raise NotFoundError(key, kind=ErrorKind.NO_SUCH_OBJECT)
        into[:] = memoryview(found)[start : start + len(into)]
        self._count(len(into))

    def size(self, key: str) -> int:
        self._travel()
        return super().size(key) if key not in self._receipts else self._receipts[key][2]

    def list(self, prefix: str) -> Iterator[str]:
        assert prefix == ATTEMPT.receipts
        for number, key in enumerate(self._receipts):
            if number % _LISTED_AT_ONCE == 0:
                self._travel()
            yield key

    def _travel(self) -> None:
        time.sleep(LATENCY_S)

    def _count(self, nbytes: int) -> None:
        with self._lock_counts:
            self.requests += 1
            self.nbytes_read += nbytes


def commit_and_plan(folder: Path, world_size: int, tensors: int) -> dict[str, float]:
    """Commit the job whose receipts lie in a folder, then plan restores from it; return what that took."""
    store = DistantStore(folder)
    before_mib = _peak_mib()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    commit = try_commit(store, ATTEMPT, world_size=world_size, committer=0, reason="benchmark", clock=SYSTEM_CLOCK)
    taken = {
        "commit, wall": time.perf_counter() - begin_s,
        "commit, CPU": time.process_time() - begin_cpu_s,
        "commit, memory": _peak_mib() - before_mib,
    }
    assert isinstance(commit, Commit), commit
    taken["manifest"] = commit.manifest_nbytes / MIB
    shapes = shapes_of(world_size, tensors)
    for case, parts in (
        ("half the ranks", Job(max(1, world_size // 2)).parts(world_size // 3, shapes)),
        ("unrelated layout", _unrelated(shapes, world_size)),
    ):
        store.requests = store.nbytes_read = 0
        begin_s = time.perf_counter()
        chunks = plan(store, commit, *parts)
        taken[f"plan, {case}"] = time.perf_counter() - begin_s
        taken[f"plan, {case}, read"] = store.nbytes_read / MIB
        taken[f"plan, {case}, requests"] = store.requests
        covered = sum(chunk.box.volume for chunk in chunks)
        assert covered >= int(np.prod(parts[1] - parts[0], axis=1).sum()), "the plan misses something"
    return taken


def plan(store: DistantStore, commit: Commit, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Chunks:
    """Find out what a rank reads that wants these parts of all tensors."""
    manifest = open_manifest(store, commit)
    numbers = {(each.item, each.name): number for number, each in enumerate(manifest.tensors) if each.rank is None}
    wanted = [numbers["model", f"layers.{number}.weight"] for number in range(len(begin))]
    boxes = [Box(tuple(a), tuple(b)) for a, b in zip(begin.tolist(), (end - begin).tolist(), strict=True)]
    return manifest.overlapping(Boxes.of(wanted, boxes))


def _unrelated(shapes: npt.NDArray[np.int64], world_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return parts of the same size for each tensor, but each somewhere else: a thousand layouts."""
    rows, columns = Job(world_size).mesh
    cells = np.random.default_rng(0).integers(0, (rows, columns), shapes.shape)
    return cells * shapes // (rows, columns), (cells + 1) * shapes // (rows, columns)


def plan_with_dcp(world_size: int, tensors: int) -> dict[str, float]:
    """Let DCP deduplicate, merge and validate the plans of all ranks, as its coordinator does after the gathering."""
    import torch
    from torch.distributed.checkpoint.default_planner import (
        _validate_global_plan,
        create_default_global_save_plan,
        dedup_save_plans,
    )
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    shapes = shapes_of(world_size, tensors)
    plans = []
    for rank in range(world_size):
        begin, end = Job(world_size).parts(rank, shapes)
        items = []
        for number, (offset, size, shape) in enumerate(
            zip(begin.tolist(), (end - begin).tolist(), shapes.tolist(), strict=True)
        ):
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
                properties=TensorProperties(),
                size=torch.Size(shape),
            )
            index = MetadataIndex(f"layers.{number}.weight", torch.Size(offset))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    begin_s = time.process_time()
    plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    assert not _validate_global_plan(plans, metadata)
    return {"plan of the save, CPU": time.process_time() - begin_s}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


_UNITS = {"memory": "MiB", "manifest": "MiB", "read": "MiB", "requests": ""}


def measure(case: str, world_size: int, tensors: int, rounds: int, *, dcp: bool = False) -> None:
    """Measure one size in fresh processes, and tell the figures."""
    with tempfile.TemporaryDirectory(prefix="control-plane-") as name:
        folder = Path(name)
        if not dcp:
            progress(f"{case}: writing receipts")
            step = max(1, math.ceil(world_size / 16))
            with ProcessPoolExecutor(os.cpu_count()) as pool:
                starts = range(0, world_size, step)
                jobs = [
                    pool.submit(
                        write_receipts, folder, world_size, tensors, range(start, min(start + step, world_size))
                    )
                    for start in starts
                ]
                for job in jobs:
                    job.result()
        taken: dict[str, list[float]] = {}
        for number in range(rounds):
            progress(f"{case}: round {number + 1} of {rounds}")
            for metric, value in _in_child(folder, world_size, tensors, dcp=dcp).items():
                taken.setdefault(metric, []).append(value)
    for metric, found in taken.items():
        tell(BENCHMARK, case, metric, _UNITS.get(metric.rpartition(", ")[2], "s"), found)


def _in_child(folder: Path, world_size: int, tensors: int, *, dcp: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(folder), str(world_size), str(tensors), *["--dcp"] * dcp]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="32,768 ranks too, and DCP with 1,024: ten minutes")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks, powers of two, instead")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--dcp", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        folder, world_size, tensors = Path(args.child[0]), int(args.child[1]), int(args.child[2])
        taken = plan_with_dcp(world_size, tensors) if args.dcp else commit_and_plan(folder, world_size, tensors)
        print(json.dumps(taken))
        return
    for world_size in args.ranks or ([1024, 32768] if args.full else [1024]):
        rounds = 1 if world_size > 4096 else args.rounds
        measure(f"{world_size} ranks x {TENSORS} tensors", world_size, TENSORS, rounds)
    world_size = 1024 if args.full else 32
    measure(f"DCP, {world_size} ranks x {TENSORS} tensors", world_size, TENSORS, 1, dcp=True)


if __name__ == "__main__":
    main()
