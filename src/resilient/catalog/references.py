"""How an attempt comes to share data objects of an earlier one.

Nobody can be kept from stalling between any two steps, so neither side trusts a check that it made before. Whoever
wants to refer writes a mark into the earlier attempt and looks for its TOMBSTONE then; whoever deletes writes the
TOMBSTONE and looks for marks then. So one of them sees the other: either no reference is made, or it is honored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count

import msgspec

from resilient.catalog.once import exists, read_or_none
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format import layout
from resilient.format.frame import seal_json, unseal_json
from resilient.format.layout import Attempt
from resilient.store.base import Store

_KIND = "reference"


def refer(store: Store, base: Attempt, by: Attempt, through: Attempt | None = None) -> bool:
    """Say whether the receipts of attempt ``by`` may name data objects of ``base`` from now on.

    Every rank that refers calls this before it writes its receipt; the mark is the attempt's, so that what is stored
    does not grow with the ranks. Marks are numbered without gaps and stay until ``base`` is gone, so that they are
    found by their exact names: a listing may be stale.

    Args:
        store: the run.
        base: an attempt that is committed, has stored the bytes itself, and counts as far as the caller knows.
        by: the attempt in the making.
        through: one that refers to ``base`` already and has a receipt that names every object that ``by`` is going to
            name: it holds them, so ``base`` itself may have been given up, as long as this one has not.

    Returns:
        False if nobody holds the objects, or the store cannot decide between two writers of a mark: then everything has
        to be stored anew.
    """
    if not store.capabilities.conditional_create:
        return False
    mark = seal_json({"kind": _KIND, **asdict(by)})
    number = 0
    while (found := read_or_none(store, _mark(base, number))) != mark:
        if found is None and store.create(_mark(base, number), mark):
            break
        number += 1
    holders = [base] if through is None else [base, through]
    return not all(exists(store, holder.tombstone) for holder in holders)


def referrers(store: Store, base: Attempt) -> Iterator[Attempt | None]:
    """Yield the attempts that have asked to refer to ``base``; None stands for one whose mark is damaged.

    Looks for the next mark only when it is asked for: whoever decides about each before it asks for the next has seen,
    when there are no more, every attempt that counted on one of these to hold what it refers to.
    """
    for number in count():
        mark = read_or_none(store, key := _mark(base, number))
        if mark is None:
            return
        yield _parse(mark, key)


def check_references(store: Store, attempt: Attempt, keys: Iterable[str]) -> None:
    """Refuse to commit an attempt that names data objects of another without a mark there: deletion would not spare it.

    Raises:
        ConflictError: kind ``divergent``, which names the object; or the attempt was given up, kind ``save-failed``.
    """
    marked: dict[Attempt | None, bool] = {attempt: True, None: False}
    for key in keys:
        base = layout.parse_data(key)
        if base is not None and base not in marked:
            marked[base] = attempt in referrers(store, base)
        if not marked[base]:
            if exists(store, attempt.tombstone):  # then its own marks, and what they held, may be gone
                raise ConflictError(f"{attempt} was given up before it was committed", kind=ErrorKind.SAVE_FAILED)
            raise ConflictError(
                f"{attempt} refers to {key}, and no mark says so: it could be deleted", kind=ErrorKind.DIVERGENT
            )


def _mark(base: Attempt, number: int) -> str:
    return base.mark("referenced", str(number))


def _parse(mark: bytes, key: str) -> Attempt | None:
    try:
        members = unseal_json(mark, key)
        by = msgspec.convert({name: members.get(name) for name in Attempt.__slots__}, Attempt)
    except (CorruptError, msgspec.ValidationError):
        return None
    return by if members.get("kind") == _KIND else None
