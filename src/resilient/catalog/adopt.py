"""Committing a save that is complete, and whose writers died before they could."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from resilient.catalog.commit import merged, read_commit, try_commit
from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.launch import claimant_lives
from resilient.catalog.line import Chain, list_attempts, read_chain, read_line
from resilient.catalog.once import exists
from resilient.catalog.verify import verify_data
from resilient.clock import Clock
from resilient.errors import ConflictError, CorruptError, ErrorKind, NotFoundError
from resilient.format.documents import Claim, Commit, Manifest
from resilient.format.layout import Attempt
from resilient.store.base import Store

REASON = "adopted"
_SHOWN = 3


def adopt(store: Store, step: int, *, clock: Clock, progress: Callable[[int, int], None] | None = None) -> Commit:
    """Commit an attempt at a step of which every rank's receipt is there; every stored byte is compared before.

    It is committed as its own writers would have done, so it makes no difference if one of them wakes up meanwhile.

    Args:
        store: the run.
        step: of the attempt.
        clock: to wait with, for a sign of life of the launch that saved it.
        progress: called with the bytes compared and all bytes to compare; from any thread, one at a time.

    Raises:
        NotFoundError: nobody has tried to save this step, or what was saved was given up.
        ConflictError: it is committed already (kind ``already-saved``); it would not count, for the run has gone on
            from an earlier step (``taken-over``); its writer may be alive (``run-in-use``); it is not complete
            (``incomplete``), and what is missing is named.
        CorruptError: what was stored is not what was written.
    """
    attempt = _find(store, step)
    claim = _check_abandoned(store, attempt, clock)
    manifest = _complete(merged(store, attempt, claim.world_size), attempt)
    bad = verify_data(store, manifest, progress=progress)
    if bad:
        named = "; ".join(f"{one.object} {one.why}" for one in bad[:_SHOWN])
        raise CorruptError(
            f"{attempt} is not adopted: {named}{f' and {len(bad) - _SHOWN} more' if len(bad) > _SHOWN else ''}",
            kind=ErrorKind.BAD_DIGEST,
            hint="go on from an older step: `resilient ls` shows which there are",
        )
    # What was read takes time, and somebody may have started meanwhile: a commit beyond its branch would be void.
    _check_counts(read_chain(store, [attempt]), attempt)
    outcome = try_commit(store, attempt, world_size=claim.world_size, committer=0, reason=REASON, clock=clock)
    commit = outcome if isinstance(outcome, Commit) else _refuse_missing(outcome, attempt)
    _check_counts(read_chain(store, [attempt]), attempt)
    return commit


def _find(store: Store, step: int) -> Attempt:
    """Return the attempt of this step that would count."""
    line = read_line(store)
    for commit in line.commits:
        if commit.step == step:
            raise ConflictError(
                f"{commit.attempt} is committed already", kind=ErrorKind.ALREADY_SAVED, hint="there is nothing to do"
            )
    listed = {attempt for attempt in list_attempts(store) if attempt.step == step}
    tried = sorted(listed.union(_under_their_names(store, line.chain, step)), reverse=True)
    if not tried:
        raise NotFoundError(
            f"{store.url}: nobody has tried to save step {step}",
            kind=ErrorKind.NO_SUCH_STEP,
            hint=_candidates(line.uncommitted),
        )
    for attempt in tried:
        if line.chain.holds(attempt):
            break
    else:
        _check_counts(line.chain, attempt := tried[0])
    if exists(store, attempt.tombstone):
        raise NotFoundError(
            f"{attempt} was given up: its data is being removed, or is gone",
            kind=ErrorKind.NO_SUCH_STEP,
            hint=_candidates(line.uncommitted),
        )
    if exists(store, attempt.commit) and read_commit(store, attempt) is None:
        raise CorruptError(f"{attempt.commit} is there and does not parse", kind=ErrorKind.MALFORMED)
    return attempt


def _under_their_names(store: Store, chain: Chain, step: int) -> list[Attempt]:
    """Return the attempts of a step that would count, found without a listing, which may be stale."""
    named = [Attempt(step=step, generation=link.generation, nonce=link.nonce) for link in chain.links.values()]
    return [attempt for attempt in named if chain.holds(attempt) and exists(store, attempt.receipt(0))]


def _candidates(uncommitted: Sequence[Attempt]) -> str:
    steps = ", ".join(str(attempt.step) for attempt in uncommitted[-5:])
    return f"these are complete and not committed: {steps}" if steps else "nothing is complete and not committed"


def _check_counts(chain: Chain, attempt: Attempt) -> None:
    """Refuse what would not count: whoever reads the run would pass over it."""
    if chain.holds(attempt):
        return
    link = chain.links.get(attempt.generation)
    if link is None or link.nonce != attempt.nonce:
        why = f"the newest generation, {chain.head}, does not continue generation {attempt.generation}"
        why += f" ({chain.broken})" if chain.broken else ""
    else:
        why = f"the run went on from step {link.limit} of generation {attempt.generation}"
    raise ConflictError(
        f"{attempt} is not adopted, for it would not count: {why}",
        kind=ErrorKind.TAKEN_OVER,
        hint="`resilient ls` shows the steps that count",
    )


def _check_abandoned(store: Store, attempt: Attempt, clock: Clock) -> Claim:
    """Return the claim under which an attempt was saved, if whoever claimed is dead, and nobody is just starting."""
    claim = read_claim(store, attempt.generation)
    if claim is None or claim.nonce != attempt.nonce:
        raise CorruptError(
            f"the claim of generation {attempt.generation} is lost or damaged: how many ranks {attempt} needs is not "
            "known",
            kind=ErrorKind.MALFORMED,
        )
    starting = [
        other
        for number in range(newest_number(store), attempt.generation, -1)
        if read_base(store, number) is None and (other := read_claim(store, number)) is not None
    ]
    for one in (claim, *starting):
        if claimant_lives(store, one, clock):
            raise ConflictError(
                f"{attempt} is not adopted: process {one.pid} on {one.host} (generation {one.generation}) is alive",
                kind=ErrorKind.RUN_IN_USE,
                hint="it commits what is complete by itself; try again when it has ended",
            )
    return claim


def _complete(outcome: Manifest | tuple[int, ...], attempt: Attempt) -> Manifest:
    return outcome if isinstance(outcome, Manifest) else _refuse_missing(outcome, attempt)


def _refuse_missing(missing: Sequence[int], attempt: Attempt) -> NoReturn:
    ranks = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    raise ConflictError(
        f"{attempt} is not complete: there is no receipt of rank {ranks}",
        kind=ErrorKind.INCOMPLETE,
        hint="it can never be committed: go on from an older step",
    )
