"""A long-lived pool of gloo ranks: real processes with a process group, without ten seconds of torchrun for each test.

A test names a module-level function; every rank calls it with the same arguments, inside an initialized process group::

    def totals(value: float) -> float:
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    def test_totals(ranks: Ranks) -> None:
        assert ranks(3).run(totals, 1.0) == [6.0, 6.0, 6.0]

The processes are forked from one server that has imported torch already, which takes milliseconds. A rank that fails or
dies fails the call, with its own traceback, and the whole pool of that size is replaced by a new one at the next use.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

MAX_SIZE = 6
START_TIMEOUT_S = 90.0
GRACE_S = 5.0
"""How long the other ranks may take to answer after the first has failed: their tracebacks often tell more."""


class RankError(Exception):
    """A rank raised, died, or did not answer in time; the message has its traceback and its last lines of output."""


class RankPool:
    """``size`` processes with one gloo process group among them. Not for several threads."""

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a pool has 1 to {MAX_SIZE} ranks, not {size}")
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[tuple[Any, Connection]] = []
        context = fork_context()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs, str(self._log(rank))), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        # The store's port is known once rank 0 listens on it.
        (port,) = self._collect({0}, START_TIMEOUT_S)
        for _, connection in self._ranks[1:]:
            connection.send(port)
        self._collect(set(range(size)), START_TIMEOUT_S)

    def run(self, function: Callable[..., T] | str, *args: object, timeout_s: float = 120.0) -> list[T]:
        """Call a function (or ``"module:function"``) on every rank; return the results in the order of the ranks.

        Raises:
            RankError: a rank raised, died, or was not done within ``timeout_s``.
        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        for _, connection in self._ranks:
            connection.send((name, args))
        return self._collect(set(range(self.size)), timeout_s)

    def pids(self) -> list[int]:
        """Return the process id of each rank, for tests that kill some."""
        return [process.pid for process, _ in self._ranks]

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.broken = True
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(START_TIMEOUT_S)
        self._ranks = []
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.log")

    def _collect(self, wanted: set[int], timeout_s: float) -> list[Any]:
        """Take one answer from each wanted rank; after a failure close the pool and raise with all that is known."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + timeout_s
        waiting = {self._ranks[rank][1]: rank for rank in wanted}
        while waiting and (left := end - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    failed, answer = ready.recv()
                except (EOFError, OSError):
                    self._ranks[rank][0].join(GRACE_S)
                    failed, answer = True, f"died with exit code {self._ranks[rank][0].exitcode}"
                if failed:
                    failures[rank] = answer
                    end = min(end, time.monotonic() + GRACE_S)
                else:
                    results[rank] = answer
        if not failures and not waiting:
            return [results[rank] for rank in sorted(results)]
        message = self._describe(failures, sorted(waiting.values()), timeout_s)
        self.close()
        raise RankError(message)

    def _describe(self, failures: dict[int, str], silent: Sequence[int], timeout_s: float) -> str:
        parts = [f"rank {rank} of {self.size}: {text}" for rank, text in sorted(failures.items())]
        if silent and not failures:
            for rank in silent:
                os.kill(self._ranks[rank][0].pid, signal.SIGABRT)  # faulthandler writes where it stands
                self._ranks[rank][0].join(GRACE_S)
            parts.append(f"ranks {silent} of {self.size} gave no answer within {timeout_s:g} s")
        for rank in sorted({*failures, *(() if failures else silent)}):
            tail = self._log(rank).read_text(errors="replace")[-3000:] if self._log(rank).exists() else ""
            if tail.strip():
                parts.append(f"rank {rank} printed:\n{tail}")
        return "\n\n".join(parts)


class Ranks:
    """Pools by size, made at first use and again after one broke."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        pool = self._pools.get(size)
        if pool is None or pool.broken:
            pool = self._pools[size] = RankPool(size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


@functools.cache
def cpu_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks, made once in a process: each has groups with threads that torch never ends."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def fork_context() -> ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"])
    return context


def _serve(rank: int, size: int, connection: Connection, log: str) -> None:
    """Be one rank: join the group, then answer calls until the pool closes the connection."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    faulthandler.enable(file=sink, all_threads=True)
    try:
        _join(rank, size, connection)
        connection.send((False, None))
        while True:
            name, args = connection.recv()
            connection.send(_answer(name, args))
    except (EOFError, OSError):
        pass  # the pool is closed
    except BaseException:  # noqa: BLE001 -- process boundary: the pool raises it
        connection.send((True, traceback.format_exc()))
    finally:
        # Not the interpreter's own end: gloo's threads sometimes abort in it (torch 2.13 with FSDP2).
        os._exit(0)


def _join(rank: int, size: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=START_TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        connection.send((False, store.port))
        port = store.port
    else:
        port = connection.recv()
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    dist.barrier()


def _answer(name: str, args: tuple[object, ...]) -> tuple[bool, Any]:
    try:
        module, _, qualname = name.partition(":")
        return False, getattr(importlib.import_module(module), qualname)(*args)
    except BaseException:  # noqa: BLE001 -- process boundary: the pool raises it
        return True, traceback.format_exc()
