"""The ranks of fault_matrix.py: real processes with a gloo group, told what to do, and killed for real."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from processes import descendants, name_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the tests' server of processes

from tests import ranks as test_ranks  # noqa: E402

if TYPE_CHECKING:
    from fault_systems import System

_MARGIN_S = 40.0
_START_S = 180.0
_NO_WRITERS = ("resource_tracker", "forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank said: ``how`` is ok, raised, died or hangs."""

    how: str
    value: Any = None
    after_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.how} after {self.after_s:.1f} s"
        return f"{text}: {self.value}" if self.how == "raised" else text


class Crew:
    """``ranks`` processes of one system in one place; who has not answered after ``deadline_s`` hangs."""

    def __init__(self, system: str, where: Any, mib: float, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self.deadline_s = where.patience_s + _MARGIN_S
        self._members: list[tuple[Any, Connection]] = []
        self._seen: set[int] = set()
        self._asked_s = 0.0
        self.notes: list[int] = []
        port = _free_port()
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            env = {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(temporary),
            }  # fmt: skip
            ours, theirs = context().Pipe()
            args = (env, str(folder / f"rank-{rank}.log"), theirs, system, where, mib)
            process = context().Process(target=_live, args=args)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._asked_s = time.monotonic()
        self.must(self.hear(_START_S))

    def ask(self, method: str, *args: object, deadline_s: float | None = None) -> list[Answer]:
        """Have every rank do something; return what each of them says."""
        self.tell(method, *args)
        return self.hear(deadline_s)

    def first_save(self, step: int) -> None:
        """Save a step before any fault; some systems start processes for it, which may take long."""
        self.must(self.ask("save", step, step, deadline_s=_START_S))

    def tell(self, method: str, *args: object) -> None:
        self._asked_s = time.monotonic()
        for _, connection in self._members:
            with suppress(OSError):
                connection.send((method, args))

    def hear(self, deadline_s: float | None = None) -> list[Answer]:
        """Return what the ranks say to what they were told last."""
        end_s = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        return [self._hear(rank, end_s) for rank in range(self.ranks)]

    def answered(self) -> bool:
        """Say whether a rank has said something, or is gone."""
        return bool(wait([connection for _, connection in self._members], 0))

    def must(self, answers: list[Answer]) -> list[Any]:
        """Return what the ranks have found.

        Raises:
            CrewError: one of them has not: what should go well has not.
        """
        for rank, answer in enumerate(answers):
            if answer.how != "ok":
                raise CrewError(f"rank {rank} {answer}")
        return [answer.value for answer in answers]

    def pid(self, rank: int) -> int:
        return int(self._members[rank][0].pid)

    def tree(self, rank: int) -> list[int]:
        """Return a rank's process and all below it."""
        found = descendants(self.pid(rank)) if self._members[rank][0].is_alive() else []
        self._seen.update(found)
        return found

    def writers(self, rank: int) -> list[int]:
        """Return the processes that a rank has started to save in."""
        return [each for each in self.tree(rank)[1:] if not any(word in name_of(each) for word in _NO_WRITERS)]

    def aim(self, *ranks: int) -> list[int]:
        """Return the processes of some ranks, none named: all, and those below: looking for them takes long."""
        return [each for rank in ranks or range(self.ranks) for each in self.tree(rank)]

    def kill(self, *ranks: int, orphans: bool = False, aimed: Sequence[int] = ()) -> None:
        """SIGKILL some ranks, none named: all; with everything that they have started, or leaving that behind.

        ``aimed``: these first, at once.
        """
        for each in aimed:
            _kill(each)
        trees = [self.tree(rank) for rank in ranks or range(self.ranks)]
        for tree in trees:
            for each in tree[:1] if orphans else tree:
                _kill(each)
        for rank in ranks or range(self.ranks):
            self._members[rank][0].join(10)

    def forget_orphans(self) -> None:
        """Let those that were left behind live on when this is closed; they end by themselves, or with the program."""
        self._seen.clear()

    def close(self) -> None:
        """Kill everything that is left, orphans included."""
        self.kill()
        for each in self._seen:
            _kill(each)
        for process, connection in self._members:
            process.join(10)
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, rank: int, end_s: float) -> Answer:
        process, connection = self._members[rank]
        while True:
            if not connection.poll(max(0.0, end_s - time.monotonic())):
                return Answer(how="hangs", after_s=time.monotonic() - self._asked_s)
            try:
                how, value, took_s = connection.recv()
            except (EOFError, OSError):
                process.join(5)
                return Answer(how="died", after_s=time.monotonic() - self._asked_s)
            if how == "note":
                self.notes.append(value)
            else:
                return Answer(how=how, value=value, after_s=took_s)


@functools.cache
def context() -> ForkServerContext:
    """Return what forks ranks from a server that has imported everything already."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    made = test_ranks.fork_context()
    peers = ["torch_checkpointing", "s3fs", "safetensors.torch"]  # one that is not installed is passed over
    ours = ["resilient.engine.api", "resilient.run.decorator", "resilient.store.s3"]
    made.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "fault_systems", "__main__", *ours, *peers])
    return made


class CrewError(Exception):
    """What should have gone well has not: nothing can be said about the fault."""


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _live(env: dict[str, str], log: str, connection: Connection, system: str, where: Any, mib: float) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sink, all_threads=True)
    os.environ |= env
    member: Any = None

    def begin() -> None:
        nonlocal member
        member = Member(connection, system, where, mib)

    _answer(connection, begin)
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # not the interpreter's own end: gloo's threads sometimes abort in it
        _answer(connection, getattr(member, method), *args)


def _answer(connection: Connection, work: Any, *args: object) -> None:
    begin_s = time.monotonic()
    try:
        how, value = "ok", work(*args)
    except BaseException as error:  # noqa: BLE001 -- process boundary: some systems raise what is no Exception
        traceback.print_exc()
        how, value = "raised", _described(error)
    with suppress(OSError):
        connection.send((how, value, time.monotonic() - begin_s))


def _described(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # what DCP wraps: by rank, with tracebacks
    if isinstance(failures, dict) and failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(error).__name__} (rank {rank}: {_described(inner)})"
    lines = str(error).strip().splitlines() or [""]
    said = re.sub(r"\[/\S+\] ", "", lines[0])  # where in its own source gloo has noticed it
    return f"{type(error).__name__}: {said[:100]}"


class Member:
    """One rank, in its own process."""

    def __init__(self, connection: Connection, system: str, where: Any, mib: float) -> None:
        import torch
        import torch.distributed as dist
        from fault_states import make_items
        from fault_systems import SYSTEMS, use_temporary_folder

        patience = str(where.patience_s)
        os.environ |= {"RESILIENT_COMMIT_TIMEOUT_S": patience, "RESILIENT_PEER_TIMEOUT_S": patience}
        use_temporary_folder(os.environ["TMPDIR"])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=where.patience_s))
        self._connection = connection
        self._items = make_items(mib)
        self._make: Callable[[], System] = lambda: SYSTEMS[system](where)
        self._system = self._make()

    def save(self, step: int, value: int) -> None:
        """Save a value as a step, and wait until the system says that it is saved."""
        self.start(step, value)
        self._system.wait()
        self._system.forget(step - 3)

    def start(self, step: int, value: int) -> None:
        from fault_states import fill

        fill(self._items, value)
        self._system.save(self._items, step)

    def wait(self) -> None:
        self._system.wait()

    def save_and_change(self, step: int, value: int, other: int) -> None:
        """Save, and change everything as soon as the call returns."""
        from fault_states import local

        self.start(step, value)
        for tensors in self._items.values():
            for tensor in tensors.values():
                local(tensor).fill_(float(other))
        self._system.wait()

    def save_many(self, first: int, count: int) -> None:
        """Save step after step, each with its own number as value; note each that is saved."""
        for step in range(first, first + count):
            self.save(step, step)
            self._connection.send(("note", step, 0.0))

    def latest(self) -> int | None:
        return self._system.latest()

    def restore(self, step: int | None, values: list[int]) -> Any:
        """Restore as a new process would; return what was `Found`."""
        from fault_states import fill, look

        fill(self._items, 0)
        return look(self._items, self._make().restore(self._items, step), values)
