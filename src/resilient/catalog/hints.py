"""Where a reader looks beside a listing, which may be stale: the steps that a generation is committing."""

from __future__ import annotations

from typing import Final

from resilient.catalog.once import read_document
from resilient.errors import CorruptError, ErrorKind, StoreError
from resilient.format import layout
from resilient.format.documents import Newest, encode_document
from resilient.format.layout import Attempt
from resilient.store.base import Store

_STEPS: Final = 4
"""The step that is about to be committed may fail: those before it must be proposed as well."""


def propose(store: Store, attempt: Attempt) -> None:
    """Have readers look for the COMMIT of an attempt that is about to get one; call it before.

    Of two committers at once the last one to write wins, and what the other one has added is missing until the next
    commit: only whoever has a stale listing too would notice. Never takes a newer step away that it has seen.

    Raises:
        StoreError: the store is away; a COMMIT would fare no better.
    """
    before = proposed(store, attempt.generation, attempt.nonce)
    steps = sorted({attempt.step, *(one.step for one in before)}, reverse=True)[:_STEPS]
    if attempt.step not in steps or attempt in before:
        return
    hint = Newest(generation=attempt.generation, nonce=attempt.nonce, steps=tuple(steps))
    try:
        store.put(layout.newest(attempt.generation), [encode_document(hint)])
    except StoreError as error:
        # Where nothing may be written over, listings alone propose. A save must not fail for that.
        if error.retryable:
            raise


def proposed(store: Store, generation: int, nonce: str) -> list[Attempt]:
    """Return the attempts that a generation proposes, newest first; none if it says nothing, or that does not parse."""
    try:
        hint = read_document(store, Newest, layout.newest(generation))
    except CorruptError as error:
        if error.kind is ErrorKind.NEWER_FORMAT:
            raise
        return []
    if hint is None or (hint.generation, hint.nonce) != (generation, nonce):
        return []
    return [Attempt(step=step, generation=generation, nonce=nonce) for step in hint.steps]
