"""Where a node keeps its tiers: one directory for each run and node, which outlives the workers, and who may remove it.

A node is what one agent looks after; without an agent, one process. The directory belongs to that agent or process: as
long as it lives nobody else touches it. What the dead leave behind in the same run is read, then removed, by the next
life of the run on this host.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from resilient.catalog.process import host, lives, started
from resilient.clock import Clock
from resilient.config import Process
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.format.digest import digest
from resilient.format.sizes import in_words
from resilient.writer.messages import MEMORY, Tier

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- a directory of our own in it, that nobody else may use
_OWNER: Final = "owner.json"
_ABANDONED_S: Final = 24 * 3600.0
"""A run that has been away for so long is not waited for: its memory goes at the next start of any run."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks after a node, as the catalog names processes."""

    host: str
    pid: int
    process_started: str
    run_id: str

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be gone; a process in another container cannot be seen.

        One of this host before it was booted again is.
        """
        living = lives(self.host, self.pid, self.process_started)
        if living is not None or self.host != host():
            return living is False
        here = _boot(started(os.getpid()))
        return bool(here) and _boot(self.process_started) not in ("", here)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTiers:
    """The tiers of this node, nearest first, and what dead nodes of this run have left on this host."""

    own: tuple[Tier, ...] = ()
    left: tuple[Tier, ...] = ()

    @property
    def all(self) -> tuple[Tier, ...]:
        return (*self.own, *self.left)

    def remove_left(self) -> None:
        """Remove what dead nodes have left: whatever counted of it is in the store now."""
        _remove(self.left)

    def remove_own(self) -> None:
        """Remove this node's own directories, at the end of a run."""
        _remove(self.own)


NO_TIERS: Final = NodeTiers()


def open_tiers(run_id: str, tiers: tuple[str, ...], process: Process, *, clock: Clock) -> NodeTiers:
    """Make this node's directories; remove those of runs that nobody has continued for a day.

    Raises:
        UsageError: a tier is no directory that can be used.
    """
    if not tiers:
        return NO_TIERS
    has_agent = process.node_dir is not None or process.elastic_id is not None
    pid = os.getppid() if has_agent else os.getpid()  # the agent starts its workers itself
    owner = Owner(host=host(), pid=pid, process_started=started(pid), run_id=run_id)
    seed = process.node_dir or f"{owner.host} {owner.pid} {owner.process_started}"
    node = digest(seed.encode()).hex()[:16]
    own, left = [], []
    for name in tiers:
        base = _base(name)
        folder = base / _folder(run_id) / node
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_owner(folder, owner)
        except OSError as error:
            raise _unusable(name, str(error)) from error
        own.append(Tier(name=name, path=str(folder)))
        left += [
            Tier(name=name, path=str(path))
            for path, theirs in _nodes(base)
            if theirs.run_id == run_id and path != folder and theirs.is_dead
        ]
        for path in _dead_of_others(base, run_id):
            if clock.now().timestamp() - _touched(path) > _ABANDONED_S:
                _remove_folder(path)
    return NodeTiers(own=tuple(own), left=tuple(left))


def check_room(tiers: NodeTiers, run_id: str, nbytes: int, *, available: Callable[[], int]) -> None:
    """Return if each tier has room for so many bytes; other runs' memory goes for it, oldest first, if they are dead.

    Raises:
        StoreError: kind ``no-space``: there is not enough; before the first step, not at the first save.
    """
    for tier in tiers.own:
        base = _base(tier.name)
        held = sum(_nbytes(Path(each.path)) for each in tiers.all if each.name == tier.name)
        dead = sorted(_dead_of_others(base, run_id), key=_touched)
        while (room := _room(base, available if tier.volatile else None) + held) < nbytes and dead:
            _remove_folder(dead.pop(0))
        if room < nbytes:
            raise StoreError(
                f"the tier {tier.name!r} needs {in_words(nbytes)} on this node, and {base} has room for"
                f" {in_words(room)}",
                kind=ErrorKind.NO_SPACE,
                hint="give the job more (for /dev/shm in a container: --shm-size, or a volume of medium Memory), or"
                " leave this tier out of tiers=",
            )


def _base(name: str) -> Path:
    """Return the directory of this user in a tier; nobody else may use it."""
    if name == MEMORY:
        place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    else:
        place = Path(name).expanduser()
        if not place.is_absolute():
            raise _unusable(name, 'is neither "memory" nor an absolute path')
    base = place / f"resilient-{os.getuid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            base.mkdir(mode=0o700)
        found = base.lstat()
    except OSError as error:
        raise _unusable(name, str(error)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise _unusable(name, f"{base} is not a directory that only this user may use")
    return base


def _folder(run_id: str) -> str:
    return digest(run_id.encode()).hex()[:16]  # what a stored document says is no name for a directory


def _write_owner(folder: Path, owner: Owner) -> None:
    # The ranks of a node write the same; none must find half of it.
    partial = folder / f".{_OWNER}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(owner))
    partial.replace(folder / _OWNER)


def _boot(process_started: str) -> str:
    return process_started.partition("/")[0] if process_started.count("/") > 1 else ""


def _nodes(base: Path) -> Iterator[tuple[Path, Owner]]:
    for path in [node for run in _within(base) for node in _within(run)]:
        try:
            yield path, msgspec.json.decode((path / _OWNER).read_bytes(), type=Owner)
        except (OSError, msgspec.DecodeError):
            continue  # it is being removed, or is nobody's


def _within(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []  # another rank has just removed it


def _dead_of_others(base: Path, run_id: str) -> list[Path]:
    return [path for path, owner in _nodes(base) if owner.run_id != run_id and owner.is_dead]


def _touched(path: Path) -> float:
    """Return when something was written there last."""
    return max((found.st_mtime for found in _all_in(path)), default=0.0)


def _nbytes(path: Path) -> int:
    return sum(found.st_blocks * 512 for found in _all_in(path))


def _all_in(path: Path) -> Iterator[os.stat_result]:
    """Look at a directory and all in it, as far as another rank does not remove it meanwhile."""
    for folder, _, names in os.walk(path):
        for each in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118 -- of many files
            with suppress(OSError):
                yield os.stat(each)  # noqa: PTH116 -- see above


def _room(base: Path, available: Callable[[], int] | None) -> int:
    found = os.statvfs(base)
    free = found.f_bavail * found.f_frsize
    return free if available is None else min(free, available())


def _remove(tiers: tuple[Tier, ...]) -> None:
    for each in tiers:
        _remove_folder(Path(each.path))


def _remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # another rank of this node may be at it too
    with suppress(OSError):
        path.parent.rmdir()  # of the run, if this was its last node here


def _unusable(name: str, why: str) -> UsageError:
    return UsageError(
        f"the tier {name!r} cannot be used: {why}",
        kind=ErrorKind.INVALID_SETTING,
        hint='a tier is "memory" or an absolute path on a disk of the node',
    )
