"""How giving an attempt up and continuing from it meet, although nobody can be kept from stalling in between.

Whoever gives up writes the TOMBSTONE and looks for ``continued-`` marks then; whoever continues writes its mark, looks
for the TOMBSTONE then, and writes its base. So one of them sees the other: either nobody continues, or the data stays.
A TOMBSTONE that lands later still was decided by the past, which must not take away what the run has gone back to: it
says under which newest generation it was decided, and readers pass over it if that one knew nothing of who continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from resilient.catalog.once import create_once, exists, read_document
from resilient.clock import Clock, rfc3339
from resilient.errors import CorruptError, ErrorKind
from resilient.format.documents import Claim, Tombstone, encode_document
from resilient.format.frame import seal_json
from resilient.format.layout import Attempt
from resilient.store.base import Store

CONTINUED: Final = "continued"
_KIND: Final = "continuation"


def hold(store: Store, attempt: Attempt, claim: Claim) -> None:
    """Keep the data of an attempt from pruners who do not know of this generation, which is about to continue it.

    The mark stays for as long as the attempt: once the generation is on the line, that protects the attempt.

    Raises:
        StoreError: the mark cannot be written, so nothing would be protected.
    """
    mark = seal_json({"kind": _KIND, **asdict(attempt), "by": claim.nonce})
    create_once(store, continuation(attempt, claim.generation), mark)


def continued_by_any(store: Store, attempt: Attempt, generations: Iterable[int]) -> int | None:
    """Return one of these generations that continues from an attempt, or is about to; None if none does."""
    return next((number for number in generations if exists(store, continuation(attempt, number))), None)


def bury(
    store: Store, attempt: Attempt, clock: Clock, *, reason: str, head: int | None, continued_by: int | None
) -> None:
    """Write the TOMBSTONE of an attempt, unless there is one that counts; see `is_buried`.

    Nothing is replaced: a pruner that stalls right before it writes could otherwise put an older decision in the place
    of a newer one. Where the one that is there is void, a second one gets a name of its own.

    Args:
        store: the run.
        attempt: which one never counts again.
        clock: for the time that people read.
        reason: for people.
        head: the newest generation of the line under which this is decided; None if it holds whoever continues: what it
            stored is gone, or was never complete.
        continued_by: the generation that continues from this very attempt on that line, if one does.
    """
    document = Tombstone(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        created=rfc3339(clock.now()),
        reason=reason,
        head=head,
    )
    content = encode_document(document)
    if create_once(store, attempt.tombstone, content) or is_buried(store, attempt, continued_by):
        return
    assert continued_by is not None, "only then can one be void"
    create_once(store, attempt.tombstone_of(continued_by), content)


def is_buried(store: Store, attempt: Attempt, continued_by: int | None) -> bool:
    """Say whether an attempt was given up, for a line on which this generation continues from it.

    Where none does (None), a TOMBSTONE counts by its name alone: a deletion that was decided once stays decided. Where
    one does, the TOMBSTONE is void if it was decided under an earlier head, for then it was decided without knowing of
    that generation; a later decision has a name of its own. One without a head, and one that does not parse, counts.
    """
    if not exists(store, attempt.tombstone):
        return False
    if continued_by is None:
        return True
    try:
        found = read_document(store, Tombstone, attempt.tombstone)
    except CorruptError as error:
        if error.kind is ErrorKind.NEWER_FORMAT:
            raise
        return True
    if found is None or found.head is None or found.head >= continued_by:
        return True
    return exists(store, attempt.tombstone_of(continued_by))


def continuation(attempt: Attempt, generation: int) -> str:
    """Return the key of the mark by which a generation says that it continues from an attempt."""
    return attempt.mark(CONTINUED, f"{generation:08d}")
