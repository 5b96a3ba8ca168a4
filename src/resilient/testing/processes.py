"""What may happen to a process: real signals on real processes, a held interpreter, memory and disks that are full."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random  # noqa: TID251 -- the type alone: callers pass a seeded one
from typing import Final, Literal, NoReturn, Protocol, Self, TypeAlias

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import ErrorKind, StoreError, UsageError


class HasPid(Protocol):
    """What stands for a process: of `subprocess`, of `multiprocessing`, ..."""

    @property
    def pid(self) -> int | None: ...


Process: TypeAlias = int | HasPid

_CLONE_FS: Final = 0x200
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2
_PAGE_NBYTES: Final = mmap.PAGESIZE
_HANG_TIMEOUT_S: Final = 3600.0
_SHM: Final = Path("/dev/shm")  # noqa: S108 -- the very place that is meant


# Faults of another process --------------------------------------------------------------------------------------------


def kill(process: Process) -> bool:
    """End a process at once, with nothing run or flushed (SIGKILL); say whether it was still there."""
    return _send(process, signal.SIGKILL)


def segfault(process: Process) -> bool:
    """End a process as a crash in native code does (SIGSEGV); say whether it was still there."""
    return _send(process, signal.SIGSEGV)


def stop(process: Process) -> bool:
    """Freeze a process (SIGSTOP): it stays alive and does nothing, until `resume`; say whether it was still there."""
    return _send(process, signal.SIGSTOP)


def resume(process: Process) -> bool:
    """Let a process go on that was frozen (SIGCONT); say whether it was still there."""
    return _send(process, signal.SIGCONT)


def kill_at_random(processes: Sequence[Process], rng: Random, *, within_s: float, clock: Clock = SYSTEM_CLOCK) -> float:
    """Kill all processes at one random moment of the next ``within_s`` seconds; return how many were waited.

    The order is random too: whoever is killed last has seen the others die.
    """
    delay_s = rng.uniform(0, within_s)
    clock.sleep(delay_s)
    for process in rng.sample(list(processes), len(processes)):
        kill(process)
    return delay_s


class ProcessFaults:
    """The same as methods, which remembers whom it has frozen: at the end of ``with`` they go on."""

    def __init__(self) -> None:
        self._stopped: list[Process] = []

    def kill(self, process: Process) -> bool:
        return kill(process)

    def segfault(self, process: Process) -> bool:
        return segfault(process)

    def stop(self, process: Process) -> bool:
        self._stopped.append(process)
        return stop(process)

    def resume(self, process: Process) -> bool:
        if process in self._stopped:
            self._stopped.remove(process)
        return resume(process)

    def kill_at_random(
        self, processes: Sequence[Process], rng: Random, *, within_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> float:
        return kill_at_random(processes, rng, within_s=within_s, clock=clock)

    def close(self) -> None:
        while self._stopped:
            resume(self._stopped.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(process: Process, number: signal.Signals) -> bool:
    pid = process if isinstance(process, int) else process.pid
    if pid is None or pid <= 1:  # 0 and below are groups, and nobody means init
        raise UsageError(f"{process!r} is no process that was started", kind=ErrorKind.INVALID_ARGUMENT)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


# Faults that a test plants in its own process -------------------------------------------------------------------------


def leave(status: int = 1) -> NoReturn:
    """End this process at once: no handlers, no ``finally``, nothing flushed."""
    os._exit(status)


def hang(timeout_s: float = _HANG_TIMEOUT_S, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Do nothing in this thread, an hour if nobody kills the process; other threads go on."""
    clock.sleep(timeout_s)


def hold_gil(duration_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Keep every thread of this interpreter from running, as native code does that never lets go."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, its calls keep the interpreter locked
    deadline = Deadline(clock, duration_s)
    while not deadline.expired:  # a signal ends a wait early
        libc.poll(None, 0, max(1, int(deadline.remaining_s * 1000)))


@contextmanager
def hog_memory(nbytes: int) -> Iterator[None]:
    """Have ``nbytes`` of memory in use: every page is touched, so it counts.

    Raises:
        MemoryError: there is not so much. (The kernel may rather kill a process: that, too, is what happens in life.)
    """
    try:
        held = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of memory: {error}") from error
    with held:
        for start in range(0, nbytes, _PAGE_NBYTES):
            held[start] = 1
        yield


# Full places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlace:
    """A directory that holds little.

    ``how`` is ``mount`` (a file system of its own, of ``nbytes``: what does not fit fails with ENOSPC) or ``limit``
    (no file of this process may become longer than ``nbytes``: writing more fails with EFBIG, see `full_disk`).
    """

    path: Path
    nbytes: int
    how: Literal["mount", "limit"]

    def fill(self, *, but_nbytes: int = 0) -> None:
        """Take what is free, but for so many bytes, up to a page; `clear` gives it back. Only if mounted."""
        if self.how == "limit":
            raise UsageError("only a place that is mounted can be filled", kind=ErrorKind.INVALID_ARGUMENT)
        state = os.statvfs(self.path)
        nbytes = max(0, state.f_bavail * state.f_frsize - but_nbytes)
        with (self.path / _BALLOON).open("wb") as balloon:
            if nbytes:
                os.posix_fallocate(balloon.fileno(), 0, nbytes)

    def clear(self) -> None:
        """Give back what `fill` took."""
        (self.path / _BALLOON).unlink(missing_ok=True)


_BALLOON: Final = ".balloon"


@contextmanager
def full_disk(nbytes: int) -> Iterator[SmallPlace]:
    """Make a directory on a disk of ``nbytes``, which is gone afterwards.

    Where this process may mount, it is a file system in memory, which all processes of this machine see. Where it may
    not, a limit on the length of files stands in (RLIMIT_FSIZE), for all files of this process and of those that it
    starts meanwhile; ``how`` of what it gives says which it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="resilient-full-"))
    mounted = _mount(folder, nbytes)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        yield SmallPlace(path=folder, nbytes=nbytes, how="mount" if mounted else "limit")
    finally:
        if mounted:
            _unmount(folder)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def full_dev_shm(nbytes: int) -> Iterator[SmallPlace]:
    """Give this thread, and the processes that it starts meanwhile, a ``/dev/shm`` of ``nbytes``.

    It is theirs alone (a mount namespace): the rest of the machine keeps its own. Of this process, only the calling
    thread and those that it starts see it.

    Raises:
        UsageError: this process may not mount; nothing stands in for that.
    """
    outside = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    entered = mounted = False
    try:
        if not (entered := _call("unshare", _CLONE_FS | _CLONE_NEWNS)):
            raise UsageError(
                "a small /dev/shm needs the right to mount (CAP_SYS_ADMIN)", kind=ErrorKind.INVALID_ARGUMENT
            )
        # Else what is mounted here would appear outside, too.
        if _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
            mounted = _mount(_SHM, nbytes)
        if not mounted:
            raise UsageError(f"nothing can be mounted at {_SHM}", kind=ErrorKind.INVALID_ARGUMENT)
        yield SmallPlace(path=_SHM, nbytes=nbytes, how="mount")
    finally:
        with suppress(StoreError):
            if mounted:
                _unmount(_SHM)
        try:
            # Threads started meanwhile share this one's root directory, and nobody who shares it may change it.
            if entered and not (_call("unshare", _CLONE_FS) and _call("setns", outside, _CLONE_NEWNS)):
                raise StoreError(f"this thread cannot go back to the machine's {_SHM}", kind=ErrorKind.IO)
        finally:
            os.close(outside)


def _mount(folder: Path, nbytes: int) -> bool:
    """Mount a file system in memory of so many bytes; say whether this process may."""
    options = f"size={nbytes},mode=1777".encode()
    return _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)


def _unmount(folder: Path) -> None:
    # Detached, so that a file that somebody still has open does not keep it.
    if not _call("umount2", os.fsencode(folder), _MNT_DETACH):
        raise StoreError(f"{folder} cannot be unmounted", kind=ErrorKind.IO)


def _call(name: str, *arguments: bytes | int | None) -> bool:
    """Call a function of the C library; say whether it may be called and has done its work.

    Raises:
        OSError: it failed for another reason than missing rights.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
        return False
    raise OSError(number, f"{name}: {os.strerror(number)}")
