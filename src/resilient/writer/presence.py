"""Which saves of a run are still being finished on this machine, by writers whose trainers may be gone."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import CorruptError
from resilient.format.digest import digest
from resilient.format.frame import seal_json, unseal_json
from resilient.writer.messages import Answer, Committed, Failed, Open, Persisted, Save, Tiered

TIERING: Final = "tiering"

_TRIES: Final = 20
_AGAIN_S: Final = 0.005
_TEMPORARY: Final = ".new-"


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A save that a living writer has promised to finish.

    ``phase`` is ``persisting`` or ``committing``, or `TIERING` for a state that goes to the tiers of the node alone.
    """

    step: int
    generation: int
    nonce: str
    rank: int
    world_size: int
    phase: str


class Presence:
    """A file that says what a writer has in hand, locked for as long as its process lives, however that ends."""

    def __init__(self, opened: Open) -> None:
        """Make the file; raise `OSError` if this user has no place for it."""
        folder = _folder(make=True)
        name = f"{_prefix(opened.run_id)}{os.getpid()}-{secrets.token_hex(4)}"
        temporary = folder / f"{_TEMPORARY}{name}"
        self._path = folder / name
        self._opened = opened
        self._saves: dict[tuple[int, bool], InFlight] = {}  # by step, and whether it goes to the store
        self._lock = threading.Lock()  # saves are taken on one thread and end on another
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Locked before it has its name: whoever finds a file that is not locked removes it.
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write()
        temporary.rename(self._path)

    def promise(self, order: Save) -> None:
        """Say that a save is in hand; called before anybody is told that it is taken."""
        opened = self._opened
        with self._lock:
            self._saves[order.step, order.stores] = InFlight(
                step=order.step,
                generation=opened.generation,
                nonce=opened.nonce,
                rank=opened.rank,
                world_size=opened.world_size,
                phase="persisting" if order.stores else TIERING,
            )
            self._write()

    def follow(self, answer: Answer) -> None:
        """Say what has become of a save, by what its trainer is told."""
        with self._lock:
            match answer:
                case Persisted() if (known := self._saves.get((answer.step, True))) is not None:
                    self._saves[answer.step, True] = msgspec.structs.replace(known, phase="committing")
                case Committed() | Failed():
                    self._saves.pop((answer.step, True), None)
                case Tiered():
                    self._saves.pop((answer.step, False), None)
                case _:
                    return
            self._write()

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._file)

    def _write(self) -> None:
        content = seal_json({"saves": [msgspec.to_builtins(each) for each in self._saves.values()]})
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))


def in_flight(run_id: str, *, clock: Clock = SYSTEM_CLOCK) -> tuple[InFlight, ...]:
    """Return the saves of a run that writers on this machine are finishing now; removes what dead ones left.

    Of every run: one that is never started again would else leave its files for ever.
    """
    try:
        folder = _folder(make=False)
        names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(_TEMPORARY)]
    except OSError:
        return ()  # no writer of this user has been here
    alive = [name for name in names if not _removed_if_dead(folder / name)]
    return tuple(each for name in alive if name.startswith(_prefix(run_id)) for each in _read(folder / name, clock))


def _removed_if_dead(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True  # its writer was quicker
    try:
        is_free = _is_free(file)
        if is_free:
            with suppress(OSError):
                path.unlink()
        return is_free
    finally:
        os.close(file)


def _read(path: Path, clock: Clock) -> Iterator[InFlight]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # its writer was quicker
    try:
        for _ in range(_TRIES):
            try:
                members = unseal_json(os.pread(file, os.fstat(file).st_size, 0), str(path))
            except CorruptError:
                clock.sleep(_AGAIN_S)  # it is being written
                continue
            yield from msgspec.convert(members["saves"], tuple[InFlight, ...])
            return
    finally:
        os.close(file)


def _is_free(file: int) -> bool:
    try:
        # Shared: two that look at the same time must not take each other for the writer.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prefix(run_id: str) -> str:
    return f"{digest(run_id.encode()).hex()}-"  # what a stored document says is no name for a file


def _folder(*, make: bool) -> Path:
    """Return a directory that nobody else can write to; raise `OSError` if there is none."""
    folder = Path(tempfile.gettempdir()) / f"resilient-{os.getuid()}"
    if make:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory that only this user may use")
    return folder
