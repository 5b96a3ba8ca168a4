"""A directory that DCP wrote, as a run of one step that can be read like any other, and only read."""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from resilient.catalog.contents import Contents
from resilient.catalog.dcp.archive import read_tensor, read_value
from resilient.catalog.dcp.metadata import METADATA, DcpTensor, DcpValue, Range, parse
from resilient.catalog.dcp.names import fqn_of
from resilient.catalog.dcp.unpickling import Refused
from resilient.catalog.once import read_or_none
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError, UsageError
from resilient.format import layout, values
from resilient.format.box import Box, intersect, split
from resilient.format.chunks import Boxes, Chunk, Chunks
from resilient.format.digest import BytesLike, digest
from resilient.format.documents import Base, Claim, Commit, Item, Manifest, Object, RunInfo, Tensor, Value
from resilient.format.documents import encode_document as encode
from resilient.format.dtypes import ITEMSIZE
from resilient.format.layout import Attempt
from resilient.store.base import Capabilities, Store

_NONCE: Final = "0" * 16
"""Of the one attempt: no generation of ours ever draws it."""
_CHUNK_NBYTES: Final = 4 << 20
_KEPT: Final = 2
"""Parts that are kept as they were read: neighboring pieces are asked for by several threads."""
_NUMBER: Final = re.compile(r"([0-9]+)[^0-9]*$")
_RANK: Final = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


def run_at(store: Store) -> Store:
    """Return what to read a run from: the store itself, or the view of what DCP has written there.

    Raises:
        NotFoundError: nothing is there.
        UsageError: something else is there.
        CorruptError: the documents of the run, or DCP's, are damaged.
    """
    try:
        open_run(store, create=False, clock=SYSTEM_CLOCK)
    except UsageError:
        view = find_dcp(store)
        if view is None:
            raise
        return view
    return store


def find_dcp(store: Store) -> DcpView | None:
    """Return the view of what DCP has written into a place; None if it has not.

    Raises:
        CorruptError: it has, and what it says of itself is damaged, or asks for code to be run.
    """
    metadata = read_or_none(store, METADATA)
    return None if metadata is None else DcpView(store, metadata)


def is_foreign(commit: Commit) -> bool:
    """Say whether a commit is that of a view."""
    return commit.nonce == _NONCE


class _Part:
    """A part of a tensor: one object of the run that is shown."""

    def __init__(self, number: int, tensor: int, box: Box, stored: Range) -> None:
        self.number = number
        self.tensor = tensor
        self.box = box
        self.range = stored
        self.chunks: tuple[Chunk, ...] | None = None
        self.lock = threading.Lock()


class DcpView:
    """Shows a DCP checkpoint as a run with one commit.

    Bytes are compared with the CRC-32 that ``torch.save`` puts into each archive, which torch itself does not look at,
    and with nothing if they are in none. Digests are computed when a part is first asked for; so what is loaded is read
    twice. The step is the last number in the place's name; 0 if there is none.
    """

    def __init__(self, store: Store, metadata: bytes) -> None:
        self._store = store
        where = f"{store.url}: {METADATA}"
        found = parse(metadata, where)
        self._parts: list[_Part] = []
        self._by_tensor: list[list[_Part]] = []
        self._keys: dict[str, _Part] = {}
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._values: list[DcpValue] = list(found.values)
        self._refused: list[str] = []
        self.attempt = Attempt(step=_step_of(store.url), generation=1, nonce=_NONCE)
        self.tensors = tuple(self._tensor(each) for each in found.tensors)
        self.objects = tuple(Object(key=key, nbytes=self._nbytes(part)) for key, part in self._keys.items())
        entries: tuple[DcpTensor | DcpValue, ...] = (*found.tensors, *found.values)
        names = dict.fromkeys(each.at.item for each in entries)
        self.items = tuple(Item(name, "mapping") for name in names)
        files = {part.range.file for part in self._parts} | {each.range.file for each in found.values}
        self.world_size = 1 + max((int(rank[1]) for rank in map(_RANK.fullmatch, files) if rank), default=0)
        self._documents = self._described(metadata)
        self._decoded: tuple[Value, ...] | None = None

    # --- what is in the checkpoint ------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        return self

    def manifest(self, *, digests: bool = True) -> Manifest:
        """Return all of it; with digests, every byte is read. Without, nothing can be read by it.

        Raises:
            UsageError: an entry has a type that this library cannot store; it is named.
        """
        entries = self.values
        if self._refused:
            raise UsageError(
                f"{self.url} has entries that cannot be taken over: {'; '.join(self._refused)}",
                kind=ErrorKind.UNSAVEABLE,
                hint="load the other entries with resilient.load, or save with torch.distributed.checkpoint without it",
            )
        rows = itertools.chain.from_iterable(self._chunks(part, digests=digests) for part in self._parts)
        return Manifest(
            step=self.attempt.step,
            generation=self.attempt.generation,
            nonce=self.attempt.nonce,
            world_size=self.world_size,
            items=self.items,
            tensors=self.tensors,
            objects=self.objects,
            chunks=Chunks.of(rows),
            values=entries,
            receipts=(),
        )

    @property
    def values(self) -> tuple[Value, ...]:
        """The entries that are no tensors; one that cannot be stored raises, by name, when it is decoded."""
        with self._lock:
            if self._decoded is None:
                self._decoded = tuple(map(self._value, self._values))
            return self._decoded

    def overlapping(self, wanted: Boxes) -> Chunks:
        """Return the chunks that share an element with any of these boxes; their parts are read for it."""
        parts = {
            part.number: part
            for row, tensor in enumerate(wanted.tensor.tolist())
            for part in self._by_tensor[tensor]
            if intersect(part.box, wanted.box(row)) is not None
        }
        rows = itertools.chain.from_iterable(self._chunks(parts[number], digests=True) for number in sorted(parts))
        return Chunks.of(rows).overlapping(wanted)

    def _tensor(self, found: DcpTensor) -> Tensor:
        mine = []
        for box, stored in found.parts:
            part = _Part(len(self._parts), len(self._by_tensor), box, stored)
            self._parts.append(part)
            self._keys[f"{stored.file}@{stored.start}"] = part
            mine.append(part)
        self._by_tensor.append(mine)
        at = found.at
        return Tensor(item=at.item, name=at.name, path=at.path, dtype=found.dtype, shape=found.shape)

    def _value(self, found: DcpValue) -> Value:
        at = found.at
        try:
            data = values.encode(read_value(self._read(found.range), f"{self.url}: {found.range}"))
        except (Refused, values.Unsaveable) as error:
            what = error.what if isinstance(error, Refused) else type(error.value).__qualname__
            self._refused.append(f"{fqn_of(at.item, at.name)} has {what}")
            data = values.unknown(what)
        return Value(item=at.item, name=at.name, path=at.path, data=data)

    def _nbytes(self, part: _Part) -> int:
        return part.box.volume * ITEMSIZE[self.tensors[part.tensor].dtype]

    def _chunks(self, part: _Part, *, digests: bool) -> tuple[Chunk, ...]:
        """Return a part in pieces, each of which lies in one range."""
        with part.lock:
            if part.chunks is not None:
                return part.chunks
            data = self._elements(part) if digests else None
            itemsize = ITEMSIZE[self.tensors[part.tensor].dtype]
            made = []
            start = 0
            for box in split(part.box, itemsize, _CHUNK_NBYTES):
                nbytes = box.volume * itemsize
                made.append(
                    Chunk(
                        tensor=part.tensor,
                        offset=box.offset,
                        size=box.size,
                        object=part.number,
                        start=start,
                        nbytes=nbytes,
                        digest=b"" if data is None else digest(data[start : start + nbytes]),
                    )
                )
                start += nbytes
            if digests:
                part.chunks = tuple(made)
            return tuple(made)

    def _elements(self, part: _Part) -> memoryview:
        """Return the elements of a part; the last ones are kept."""
        with self._lock:
            if part.number in self._kept:
                self._kept.move_to_end(part.number)
                return self._kept[part.number]
        tensor = self.tensors[part.tensor]
        where = f"{self.url}: {part.range} ({fqn_of(tensor.item, tensor.name)})"
        data = read_tensor(self._read(part.range), tensor.dtype, part.box.size, where)
        with self._lock:
            self._kept[part.number] = data
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return data

    def _read(self, stored: Range) -> BytesLike:
        file = stored.file
        try:
            if file not in self._sizes:
                self._sizes[file] = self._store.size(file)
            # Before there is memory for it: a damaged number may ask for more than any machine has.
            if stored.start + stored.nbytes > self._sizes[file]:
                raise CorruptError(f"{self.url}: {file} is too short", kind=ErrorKind.MALFORMED)
            data = bytearray(stored.nbytes)
            self._store.read_into(file, stored.start, memoryview(data))
        except NotFoundError as error:
            raise CorruptError(f"{self.url}: {file} is missing", kind=ErrorKind.MALFORMED) from error
        return data

    # --- the store ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=False, atomic_put=False, ranged_read=True, request_nbytes=_CHUNK_NBYTES)

    def get(self, key: str) -> bytes:
        if key in self._documents:
            return self._documents[key]
        raise _absent(self.url, key)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        if key not in self._keys:
            raise _absent(self.url, key)
        part = self._keys[key]
        with part.lock:  # of several that want it, one reads it
            data = self._elements(part)
        if start + len(into) > len(data):
            raise CorruptError(f"{self.url}: {key} has {len(data)} bytes", kind=ErrorKind.MALFORMED)
        into[:] = data[start : start + len(into)]

    def size(self, key: str) -> int:
        if key in self._documents:
            return len(self._documents[key])
        if key in self._keys:
            return self._nbytes(self._keys[key])
        raise _absent(self.url, key)

    def list(self, prefix: str) -> Iterator[str]:
        return (key for key in (*self._documents, *self._keys) if key.startswith(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        below = [key.removeprefix(prefix) for key in self._documents if key.startswith(prefix)]
        return iter(dict.fromkeys(key.partition("/")[0] for key in below if "/" in key))

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        del parts
        self._refuse(key)

    def create(self, key: str, data: bytes) -> bool:
        del data
        self._refuse(key)

    def delete(self, key: str) -> None:
        self._refuse(key)

    def close(self) -> None:
        self._store.close()

    def _refuse(self, key: str) -> NoReturn:
        raise StoreError(
            f"{self.url} was written by torch.distributed.checkpoint and is only read here: {key} is not written",
            kind=ErrorKind.ACCESS_DENIED,
            hint="`resilient restore` copies it into a run",
        )

    def _described(self, metadata: bytes) -> dict[str, bytes]:
        attempt = self.attempt
        claim = Claim(
            generation=attempt.generation,
            nonce=attempt.nonce,
            launch=attempt.nonce,
            world_size=self.world_size,
            host="",
            pid=0,
            process_started="",
            created="",
            versions={},
        )
        commit = Commit(
            step=attempt.step,
            generation=attempt.generation,
            nonce=attempt.nonce,
            manifest=digest(metadata).hex(),
            manifest_nbytes=len(metadata),
            nbytes=sum(each.nbytes for each in self.objects),
            world_size=self.world_size,
            items=tuple(item.name for item in self.items),
            created="",
            reason="torch.distributed.checkpoint",
            committer=0,
        )
        return {
            layout.RUN: encode(RunInfo(run_id=_NONCE, created="")),
            layout.claim(attempt.generation): encode(claim),
            layout.base(attempt.generation): encode(Base(generation=attempt.generation, nonce=attempt.nonce)),
            attempt.commit: encode(commit),
        }


def _step_of(url: str) -> int:
    found = _NUMBER.search(url.rstrip("/").rpartition("/")[2])
    return int(found[1][-12:]) if found else 0


def _absent(url: str, key: str) -> NotFoundError:
    return NotFoundError(f"{url} has no object {key}", kind=ErrorKind.NO_SUCH_OBJECT)
