"""How a small document comes to be exactly once, and how it is read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from resilient.errors import CorruptError, ErrorKind, NotFoundError
from resilient.format.documents import decode_document
from resilient.store.base import Store

D = TypeVar("D")
T = TypeVar("T")

_AGAIN: Final = 2


def create_once(store: Store, key: str, data: bytes) -> bool:
    """Create an object unless there is one; say whether the one that is there now is ours.

    Where the store cannot decide between two writers, the object is read back, so that the one that was overwritten
    learns of it.
    """
    if not store.create(key, data):
        return False
    return store.capabilities.conditional_create or read_or_none(store, key) == data


def read_or_none(store: Store, key: str) -> bytes | None:
    """Return a whole object, or None if there is none."""
    try:
        return store.get(key)
    except NotFoundError:
        return None


def exists(store: Store, key: str) -> bool:
    """Say whether an object of this exact name is there."""
    try:
        store.size(key)
    except NotFoundError:
        return False
    return True


def read_document(store: Store, kind: type[D], key: str) -> D | None:
    """Return a sealed document, or None if there is none.

    Raises:
        CorruptError: it is there and torn, changed, of another kind, or of a newer format; its key is named.
    """

    def read() -> D | None:
        data = read_or_none(store, key)
        if data is None:
            return None
        found: Any = decode_document(kind, data, key)
        assert isinstance(found, kind)
        return found

    return again_if_corrupt(read)


def again_if_corrupt(read: Callable[[], T]) -> T:
    """Return what ``read`` returns, and call it again, twice at most, if that is corrupt.

    What was damaged on its way, and not in the store, is right then: a bit that flips on the wire must not make a run
    continue from an older step. Twice, because a bad link that damages one answer in twenty damages two in a row once
    in a few hundred reads, which a run of some days makes.
    """
    for _ in range(_AGAIN):
        try:
            return read()
        except CorruptError as error:
            if error.kind is ErrorKind.NEWER_FORMAT:
                raise
    return read()
