"""Whether a place can be used for a run, found out in seconds and without leaving anything behind."""

from __future__ import annotations

import secrets

from resilient.errors import ErrorKind, NotFoundError, StoreError
from resilient.format.layout import CONTROL
from resilient.store.base import Store
from resilient.store.retrying import Retrying

TIMEOUT_S = 5.0
"""How long each call of a probe goes on trying: a wrong address is told at once, not at the first save."""


def probe(store: Store) -> None:
    """List, create, read and remove one tiny object; raise the first error, with the place in it.

    What it cannot use raises `StoreError`: an endpoint that cannot be reached, credentials that are not accepted, a
    call that is denied, a bucket that does not exist, a file or a read-only file system where a directory should be, a
    full disk.
    """
    quick = store.within(TIMEOUT_S) if isinstance(store, Retrying) else store
    nonce = secrets.token_hex(8)
    key, content = f"{CONTROL}probe-{nonce}", nonce.encode()
    for _ in quick.folders(""):
        break  # a reader that may not list would take a full place for an empty one
    try:
        if not quick.create(key, content) or quick.get(key) != content:
            raise _untrustworthy(store, "does not give back what was just stored")
        if quick.create(key, b"another"):  # some servers ignore the condition: two runs would both believe they won
            raise _untrustworthy(store, "lets a second writer replace what a first one created")
        quick.delete(key)
    except NotFoundError as error:
        raise _untrustworthy(store, "does not give back what was just stored") from error


def _untrustworthy(store: Store, what: str) -> StoreError:
    return StoreError(
        f"{store.url} {what}",
        kind=ErrorKind.UNTRUSTWORTHY_STORE,
        hint=f"run `resilient doctor {store.url}`",
    )
