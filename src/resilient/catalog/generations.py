"""Which lives of the worker group there have been, and starting a new one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache

from resilient.catalog import process
from resilient.catalog.once import create_once, exists, read_document
from resilient.catalog.tombstones import hold
from resilient.clock import SYSTEM_CLOCK, Clock, rfc3339
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format import layout
from resilient.format.documents import Base, Claim, Commit, encode_document
from resilient.format.layout import Attempt
from resilient.store.base import Store


def claim_generation(
    store: Store, *, world_size: int, launch: str, heartbeat: bool, clock: Clock = SYSTEM_CLOCK
) -> Claim:
    """Start a new generation: exclusively create the claim that follows the newest one.

    Listings only propose where to begin. A claim that is there but torn keeps its number and blocks nothing: the next
    one is taken.

    Args:
        store: the run.
        world_size: of the new generation.
        launch: names the start of the job that this generation belongs to.
        heartbeat: whether that launch shows that it lives, so that others wait for it.
        clock: for the time that people read in the claim.
    """
    generation = newest_number(store) + 1
    while True:
        claim = Claim(
            generation=generation,
            nonce=process.nonce(),
            launch=launch,
            world_size=world_size,
            host=process.host(),
            pid=os.getpid(),
            process_started=process.started(os.getpid()),
            created=rfc3339(clock.now()),
            versions=dict(_versions()),
            heartbeat=heartbeat,
        )
        if create_once(store, layout.claim(generation), encode_document(claim)):
            return claim
        generation += 1


def newest_number(store: Store) -> int:
    """Return the number of the newest claim, readable or not; 0 if there is none.

    The listing may be stale (directories are cached on NFS), so the names after the one that it gives are tried too.
    """
    newest = max(claimed_numbers(store), default=0)
    while exists(store, layout.claim(newest + 1)):
        newest += 1
    return newest


def claimed_numbers(store: Store) -> list[int]:
    """Return the numbers for which a listing shows a claim, in no order."""
    numbers = map(layout.parse_claim, store.list(layout.GENERATIONS))
    return [number for number in numbers if number is not None]


def read_claim(store: Store, generation: int) -> Claim | None:
    """Return the claim of a generation; None if there is none, or it does not parse."""
    try:
        claim = read_document(store, Claim, layout.claim(generation))
    except CorruptError as error:
        _refuse_newer(error)
        return None
    return claim if claim is not None and claim.generation == generation else None


def newest_claim(store: Store) -> Claim | None:
    """Return the newest claim that parses."""
    for generation in range(newest_number(store), 0, -1):
        claim = read_claim(store, generation)
        if claim is not None:
            return claim
    return None


def write_base(store: Store, claim: Claim, continues: Commit | None) -> Base:
    """Say where a generation continues from, before its first save; None is a fresh start.

    From then on it counts, whatever pruners of earlier generations still write, and its data stays: see `tombstones`.

    Raises:
        StoreError: that cannot be written, or not be protected.
        ConflictError: this generation has another base already, so it is somebody else's; or (kind ``taken-over``) the
            attempt that it would continue was given up meanwhile, or is a later generation's, and this generation then
            has no base.
    """
    if continues is not None and continues.generation >= claim.generation:
        # Stalled between its claim and its choice: nobody would ever see what it saves.
        raise ConflictError(
            f"{store.url}: generation {continues.generation} has taken over before generation {claim.generation} began",
            kind=ErrorKind.TAKEN_OVER,
            hint="stop this job: what it would save does not count",
        )
    if continues is not None:
        # The mark first, then the look: whoever gives up does it the other way round, so one of us sees the other.
        hold(store, continues.attempt, claim)
        _refuse_given_up(store, claim, continues.attempt)
    base = Base(generation=claim.generation, nonce=claim.nonce)
    if continues is not None:
        base = Base(
            generation=claim.generation,
            nonce=claim.nonce,
            step=continues.step,
            base_generation=continues.generation,
            base_nonce=continues.nonce,
            manifest=continues.manifest,
        )
    if not create_once(store, layout.base(claim.generation), encode_document(base)):
        raise ConflictError(
            f"{store.url}: generation {claim.generation} has another base already ({layout.base(claim.generation)})",
            kind=ErrorKind.RUN_IN_USE,
            hint="two writers took the same generation; start again, which claims the next one",
        )
    if continues is not None:
        try:
            # Once more, for a TOMBSTONE that holds for ever: the first ones did not say under which head.
            _refuse_given_up(store, claim, continues.attempt)
        except ConflictError:
            # Nothing was saved on it. Left there, it would take what its predecessor has saved since off the line.
            store.delete(layout.base(claim.generation))
            raise
    return base


def _refuse_given_up(store: Store, claim: Claim, start: Attempt) -> None:
    """Raise if retention of an earlier generation, which may live on until it sees the base, deletes the start."""
    # Imported when wanted: the line is read by what this module offers.
    from resilient.catalog.line import is_given_up  # noqa: PLC0415

    if is_given_up(store, start):
        raise ConflictError(
            f"{store.url}: {start}, from which generation {claim.generation} would continue, was deleted meanwhile",
            kind=ErrorKind.TAKEN_OVER,
            hint="start again: what is the newest now will be chosen",
        )


def read_base(store: Store, generation: int) -> Base | None:
    """Return where a generation continues from; None if it does not say, or the document does not parse."""
    try:
        base = read_document(store, Base, layout.base(generation))
    except CorruptError as error:
        _refuse_newer(error)
        return None
    return base if base is not None and base.generation == generation else None


def _refuse_newer(error: CorruptError) -> None:
    if error.kind is ErrorKind.NEWER_FORMAT:
        raise error  # not torn: a newer library's, which this one must not pretend away


@cache
def _versions() -> Mapping[str, str]:
    # Imported when wanted: readers claim nothing, and this costs them a fifth of their start.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    found = {"python": platform.python_version()}
    for name, distribution in (("resilient", "resilient-torch"), ("torch", "torch")):
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
