"""A directory as a store."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.direct_writing import LEAST_NBYTES, write_directly
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.local_reading import REQUEST_NBYTES, UNIT_NBYTES, read
from resilient.store.os_faults import store_error

TEMPORARY = ".tmp-"
"""How names of unfinished files start. A killed writer leaves some behind; nothing ever lists or reads them."""

_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"\d+-[0-9a-f]{16}")

_BUFFERS_PER_WRITE = max(16, os.sysconf("SC_IOV_MAX"))
_TRIES = 100  # how often a directory may vanish under us (somebody else tidying up) before we call it an error


class LocalStore:
    """Objects as files below one directory, which is made with the first object.

    What has returned survives a power cut: a file is written under a temporary name, synced, published by ``rename`` or
    ``link``, and its directory is synced, as is the parent of every directory on the way that this instance has not
    synced before. Not if the place is ``volatile``, a file system in memory: there it only survives the process.
    """

    capabilities = Capabilities(
        conditional_create=True,
        atomic_put=True,
        ranged_read=True,
        request_nbytes=REQUEST_NBYTES,
        unit_nbytes=UNIT_NBYTES,
    )

    def __init__(self, root: str | os.PathLike[str], *, volatile: bool = False) -> None:
        self._root = Path(root).expanduser().absolute()  # absolute: a later chdir must not move the place
        self._volatile = volatile
        # Single operations on these sets are atomic; a lost race costs one more sync, or leaves an empty directory.
        self._durable: set[Path] = set()
        self._made: set[Path] = set()

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def root(self) -> Path:
        return self._root

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        path = self._path(key)
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        with _faults(f"put of {key!r}", path, nbytes=sum(view.nbytes for view in views)):
            temporary = self._write_beside(path, views)
            try:
                temporary.replace(path)
            except OSError:
                _unlink(temporary)
                raise
            self._sync(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _faults(f"create of {key!r}", path, nbytes=len(data)):
            # Not O_EXCL: a writer killed between that and the last byte leaves a torn object that blocks the key for
            # ever.
            temporary = self._write_beside(path, [memoryview(data)] if data else [])
            try:
                os.link(temporary, path)
            except FileExistsError:
                ours = path.read_bytes() == data  # also how a retry after a lost answer finds its own write (NFS)
            except OSError as error:
                if error.errno in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                    raise _no_links(key, path) from error
                raise
            else:
                ours = True
            finally:
                _unlink(temporary)
            self._sync(path.parent)
            return ours

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _faults(f"get of {key!r}", path), _opened(path) as file:
            content = bytearray(os.fstat(file).st_size)
            return bytes(memoryview(content)[: read(file, 0, memoryview(content))])

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        path = self._path(key)
        view = into.cast("B")
        with _faults(f"read of {key!r}", path), _opened(path) as file:
            count = read(file, start, view)
            if count < view.nbytes:
                end, size = start + view.nbytes, os.fstat(file).st_size
                message = f"object {key!r} in {self.url} ends at byte {size}; bytes {start} to {end} are wanted"
                raise CorruptError(message, kind=ErrorKind.MALFORMED)

    def size(self, key: str) -> int:
        path = self._path(key)
        with _faults(f"size of {key!r}", path), _opened(path) as file:
            return os.fstat(file).st_size

    def written_at(self, key: str) -> datetime:
        """Return when an object was written, by the clock of the file system (of its server, if it is a network's)."""
        path = self._path(key)
        with _faults(f"time of {key!r}", path), _opened(path) as file:
            return datetime.fromtimestamp(os.fstat(file).st_mtime, UTC)

    def list(self, prefix: str) -> Iterator[str]:
        pending = [checked_prefix(prefix)]
        while pending:
            folder = pending.pop()
            for entry in self._scan(folder):
                if entry.is_dir():
                    pending.append(f"{folder}{entry.name}/")
                else:
                    yield folder + entry.name

    def folders(self, prefix: str) -> Iterator[str]:
        for entry in self._scan(checked_prefix(prefix)):
            if entry.is_dir():
                yield entry.name

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _faults(f"delete of {key!r}", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            with suppress(FileNotFoundError):  # another thread removed the directory, and the object's name with it
                self._sync(path.parent)
            self._tidy(path.parent)

    def sweep(self, before: datetime) -> int:
        """Remove unfinished files that nobody has written to since ``before``; return how many there were."""
        count = 0
        for folder, _, names in os.walk(self._root):
            for path in (Path(folder, name) for name in names if _UNFINISHED.fullmatch(name)):
                with suppress(OSError):  # finished or removed meanwhile, or not ours to remove
                    if path.stat().st_mtime < before.timestamp():
                        path.unlink()
                        count += 1
        return count

    def close(self) -> None:
        """Nothing is held open between calls."""

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        path = self._root / folder
        with _faults(f"list of {folder!r}", path):
            try:
                with os.scandir(path) as entries:
                    yield from [entry for entry in entries if not entry.name.startswith(TEMPORARY)]
            except FileNotFoundError:
                return  # nothing under that prefix, or tidied away meanwhile

    def _write_beside(self, path: Path, views: Sequence[memoryview]) -> Path:
        """Write a durable file under a temporary name in the directory of ``path``; return its name."""
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
        file = self._open_new(temporary)
        try:
            cached = self._volatile or sum(view.nbytes for view in views) < LEAST_NBYTES
            if cached or not write_directly(file, views):
                _write(file, views)
            if not self._volatile:
                os.fsync(file)
        except BaseException:
            _unlink(temporary)
            raise
        finally:
            os.close(file)
        return temporary

    def _open_new(self, path: Path) -> int:
        for _ in range(_TRIES):
            try:
                self._make_durable(path.parent)
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # another thread or process removed an empty directory between two calls
                self._durable.difference_update(path.parents)
        raise FileNotFoundError(errno.ENOENT, "the directory keeps vanishing", str(path.parent))

    def _make_durable(self, folder: Path) -> None:
        """Make ``folder`` and what is above it, and see to it that each one's entry in its parent is on the disk.

        Also for directories that another process made: it may not have synced their parents yet when we rely on them.
        """
        missing: list[Path] = []
        while folder not in self._durable and folder != folder.parent:
            missing.append(folder)
            if folder == self._root and folder.is_dir():
                break  # what is above an existing place is not ours to sync
            folder = folder.parent
        for each in reversed(missing):
            try:
                each.mkdir()
                self._made.add(each)
            except FileExistsError:
                # One look; it fails with FileNotFoundError if somebody has tidied up since: then all over again.
                if not stat.S_ISDIR(each.stat().st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each)) from None
            with suppress(PermissionError):  # a parent that we may pass but not read, above the place
                self._sync(each.parent)
            self._durable.add(each)

    def _sync(self, folder: Path) -> None:
        if not self._volatile:
            _sync_folder(folder)

    def _tidy(self, folder: Path) -> None:
        """Remove directories that are empty now, of those that this instance made."""
        while folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or somebody else was quicker: an empty directory is harmless
            self._made.discard(folder)
            self._durable.discard(folder)
            folder = folder.parent


@contextmanager
def _faults(doing: str, path: Path, *, nbytes: int = 0) -> Iterator[None]:
    try:
        yield
    except StoreError:  # is an OSError too
        raise
    except OSError as error:
        raise store_error(error, doing=doing, path=path, nbytes=nbytes) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _absent(path) from error
    try:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise _absent(path)
        yield file
    finally:
        os.close(file)


def _absent(path: Path) -> NotFoundError:
    return NotFoundError(f"there is no object {path}", kind=ErrorKind.NO_SUCH_OBJECT)


def _no_links(key: str, path: Path) -> StoreError:
    return StoreError(
        f"create of {key!r} failed at {path}: this file system has no hard links",
        kind=ErrorKind.UNTRUSTWORTHY_STORE,
        hint="two writers could both believe that they won: choose a POSIX file system or an object store",
    )


def _write(file: int, views: Sequence[memoryview]) -> None:
    """Write all buffers, without joining them: a call takes many, and may take only a part of what it is given."""
    waiting = iter(views)
    batch = list(islice(waiting, _BUFFERS_PER_WRITE))
    while batch:
        written = os.writev(file, batch)
        done = 0
        while done < len(batch) and written >= batch[done].nbytes:
            written -= batch[done].nbytes
            done += 1
        del batch[:done]
        if written:
            batch[0] = batch[0][written:]
        batch.extend(islice(waiting, done))


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unlink(path: Path) -> None:
    with suppress(OSError):  # a leftover is harmless and recognizable by its name; the error that led here matters more
        path.unlink()
