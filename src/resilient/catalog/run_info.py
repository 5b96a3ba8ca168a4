"""Whether a place is a run, and making it one."""

from __future__ import annotations

import uuid
from typing import Final

from resilient.catalog.once import create_once, exists, read_document
from resilient.clock import Clock, rfc3339
from resilient.errors import CorruptError, ErrorKind, NotFoundError, UsageError
from resilient.format import layout
from resilient.format.documents import RunInfo, encode_document
from resilient.store.base import Store

_OWN: Final = (layout.GENERATIONS, layout.STEPS, layout.DATA)


def open_run(store: Store, *, create: bool, clock: Clock) -> RunInfo:
    """Return what ``run.json`` says; with ``create``, make an empty or absent place a run.

    Raises:
        NotFoundError: the place is empty or absent, and ``create`` is not set.
        UsageError: other files are there and no ``run.json``.
        CorruptError: ``run.json`` is torn or lost, or the run was written in a newer format.
    """
    found = read_info(store)
    if found is None:
        strange = _strangers(store)
        found = read_info(store)  # again: somebody may have made the run between the two looks
        if found is None and strange is not None:
            raise strange
    if found is not None:
        return found
    if not create:
        raise NotFoundError(
            f"{store.url} holds no run: nothing is there", kind=ErrorKind.NO_CHECKPOINT, hint="check the place"
        )
    mine = RunInfo(run_id=uuid.uuid4().hex, created=rfc3339(clock.now()))
    if create_once(store, layout.RUN, encode_document(mine)):
        return mine
    found = read_info(store)
    if found is None and not store.capabilities.atomic_put:
        store.put(layout.RUN, [encode_document(mine)])  # half a document of somebody who was cut off, and no run yet
        found = read_info(store)
    if found is None:
        raise CorruptError(f"{store.url}: {layout.RUN} vanished while it was being written", kind=ErrorKind.MALFORMED)
    return found


def read_info(store: Store) -> RunInfo | None:
    """Return what ``run.json`` says; None if there is none, or only half of one, whose writer came no further.

    A store that shows half an object keeps half a ``run.json`` if its writer is killed. That must not block the place
    for ever: before the first claim, which stays, nobody has relied on it.

    Raises:
        CorruptError: it is torn, and a run is there; or it was written in a newer format.
    """
    try:
        return read_document(store, RunInfo, layout.RUN)
    except CorruptError as error:
        blocks = store.capabilities.atomic_put or error.kind is ErrorKind.NEWER_FORMAT
        if blocks or exists(store, layout.claim(1)):
            raise
        return None


def _strangers(store: Store) -> UsageError | CorruptError | None:
    """Return what is wrong with a place that has no ``run.json``; None if it is empty but for traces of a probe."""
    folders = {f"{name}/" for name in store.folders("")}
    if any(any(store.list(own)) for own in _OWN if own in folders):
        return CorruptError(
            f"{store.url}: {layout.RUN} is missing, though other parts of a run are there",
            kind=ErrorKind.MALFORMED,
            hint=f"put {layout.RUN} back from a copy, or choose another place",
        )
    # Names of folders suffice where there are some: a foreign place may hold millions of objects.
    strange = sorted(folders - {*_OWN, layout.CONTROL})
    if not strange:
        strange = sorted(key for key in store.list("") if not key.startswith((layout.CONTROL, layout.RUN)))
    if not strange:
        return None
    shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
    return UsageError(
        f"{store.url} is not a run: it holds {shown} and no {layout.RUN}",
        kind=ErrorKind.NOT_A_RUN,
        hint="name the directory of the run itself, or an empty place",
    )
