"""Whether an object that was there already is the one that a create wanted to make."""

from __future__ import annotations

from resilient.errors import ErrorKind, NotFoundError, StoreError
from resilient.store.base import Store


def is_ours(store: Store, key: str, data: bytes) -> bool:
    """Say whether the object under ``key`` holds ``data``: the answer to an earlier try may have been lost.

    Raises:
        StoreError: retryable: it was there a moment ago and is not now.
    """
    try:
        return store.get(key) == data
    except NotFoundError as error:
        message = f"create of {key!r} in {store.url}: an object was there a moment ago and is not now"
        raise StoreError(message, kind=ErrorKind.IO, retryable=True) from error
