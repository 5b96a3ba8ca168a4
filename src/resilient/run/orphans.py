"""A worker whose agent is gone ends with it: nobody would restart it, judge it, or ever end it.

torchelastic starts each worker in a session of its own, and an agent that is killed, or ended by a signal that it does
not handle, just leaves them: stock workers were still there more than eight minutes later, holding their devices, and
waiting for peers. What is staged is not lost: the writer process has a session of its own, and finishes it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Final

from resilient.catalog.process import started
from resilient.clock import Clock
from resilient.config import Process

_LOOK_EVERY_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_WATCHER: Final = "resilient-orphans"
_PROC: Final = Path("/proc")
_PARENT_FIELD: Final = 1  # of /proc/PID/stat, counted from the state, which follows the parenthesized name
# Who adopts a process whose parent has died; none of them is an agent. The first process of a container does as well,
# whatever it is; an agent may be that itself, but is Python then.
_ADOPTERS: Final = frozenset(
    ["catatonit", "conmon", "docker-init", "dumb-init", "init", "pause", "s6-svscan", "slurmstepd", "systemd", "tini"]
)
_AGENTS: Final = (b"python", b"torchrun", b"resilient")


def end_with_agent(process: Process, clock: Clock) -> None:
    """Let this process, and the loader workers that it forks, end as soon as the agent that started it is gone.

    Twice, because each way has a gap. The kernel kills this process at once, also if it hangs in native code; but only
    Linux does, only for a direct child, and only this process. A thread looks twice a second, and ends all of the
    process group. Does nothing where no agent of torchelastic started this process, or if it was called before.
    """
    if process.elastic_id is None or any(each.name == _WATCHER for each in threading.enumerate()):
        return
    parent = os.getppid()
    agent = _agent(parent, process.error_file)
    if _name(agent) in _ADOPTERS or (agent == 1 and not _may_be_agent(agent)):
        _end()  # the agent was gone before this process had come so far
    if agent == parent:
        _die_with_parent()
    born = started(agent)
    if agent == parent and os.getppid() != parent:
        _end()  # it went away before the kernel was asked to look

    def is_gone() -> bool:
        return (agent == parent and os.getppid() != parent) or (bool(born) and started(agent) != born)

    watcher = _Watcher(is_gone, clock)
    watcher.start()
    register_after_fork(watcher, _Watcher.renew_in_child)


class _Watcher(threading.Thread):
    """Ends this process when something is gone. Part of the process to its end, so that nobody has to close it."""

    def __init__(self, is_gone: Callable[[], bool], clock: Clock) -> None:
        super().__init__(name=_WATCHER, daemon=True)
        self._is_gone = is_gone
        self._clock = clock

    def run(self) -> None:
        while not self._is_gone():
            self._clock.sleep(_LOOK_EVERY_S)
        _end()

    def renew_in_child(self) -> None:
        """Watch the trainer from a process that it forked to live no longer than itself, such as a loader's worker.

        torch's own look happens every five seconds, and not while a sample is made. No wish to the kernel here: it
        would count from the end of the *thread* that forked.
        """
        trainer = multiprocessing.parent_process()
        if trainer is not None and multiprocessing.current_process().daemon:
            pid = trainer.pid
            _Watcher(lambda: os.getppid() != pid, self._clock).start()


def _agent(parent: int, error_file: str | None) -> int:
    """Return the process that started this worker: a shell or a profiler between them is part of the worker.

    Known by the file for its error, which torchelastic names to each worker, and to nobody else.
    """
    mark = os.fsencode(f"TORCHELASTIC_ERROR_FILE={error_file}")
    pid = parent
    while error_file is not None and pid > 0:
        try:
            if mark not in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                break
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            return parent  # not ours to look at, or no such system
        pid = int(stat.rpartition(")")[2].split()[_PARENT_FIELD])
    return pid


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _may_be_agent(pid: int) -> bool:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(name in word for word in words[:3] for name in _AGENTS)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends; for an agent, that is its main one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end() -> None:
    """End this process and what it started, as the agent would have done; nothing is run or flushed."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    for child in multiprocessing.active_children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
