"""Whether what is committed counts: asked of the documents that decide, right after the commit."""

from __future__ import annotations

from resilient.catalog.line import read_chain
from resilient.catalog.once import exists
from resilient.errors import ConflictError, ErrorKind, ResilientError, StoreError
from resilient.format import layout
from resilient.format.documents import Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store


def find_void(store: Store, commit: Commit) -> ResilientError | None:
    """Return why no reader would count a commit: another launch has taken over, or the run's documents are gone.

    Asks for the documents that decide, not for the whole line: a save must cost the same after a thousand others.
    """
    void = f"{store.url}: {commit.attempt} is committed and does not count"
    chain = read_chain(store, [commit.attempt])
    counts = chain.holds(commit.attempt)
    if not counts and chain.head >= commit.generation:
        return ConflictError(
            f"{void}: generation {chain.head} has taken over",
            kind=ErrorKind.TAKEN_OVER,
            hint="stop this job: what it saves is lost",
        )
    if not counts or not exists(store, layout.RUN):
        gone = layout.RUN if counts else f"{layout.GENERATIONS} or parts of it"
        return StoreError(
            f"{void}: somebody deleted {gone}",
            kind=ErrorKind.SAVE_FAILED,
            hint="put it back, or save to another place: what is saved here cannot be found",
        )
    return None


def overtaken_by(store: Store, attempt: Attempt) -> int | None:
    """Return the newer generation that has begun elsewhere, so that an attempt would not count; None if there is none.

    One that continues from this very attempt waits for it, and is none.
    """
    chain = read_chain(store, [attempt])
    return chain.head if chain.head > attempt.generation and not chain.holds(attempt) else None
