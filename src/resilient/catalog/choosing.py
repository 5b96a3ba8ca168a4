"""Which checkpoints are passed over because somebody has marked them failed, and how that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resilient.catalog.line import Line
from resilient.catalog.marks import FAILED, is_failed
from resilient.errors import CorruptError, ErrorKind
from resilient.format.documents import Commit
from resilient.store.base import Store


def why_failed(store: Store, commit: Commit) -> str | None:
    """Return who has marked a checkpoint failed, and why; None if nobody has."""
    mark = is_failed(store, commit.attempt)
    if mark is None:
        return None
    return f"marked failed by the {mark.by}: {mark.why}" if mark.why else f"marked failed by the {mark.by}"


def passed_over(store: Store, line: Line, commits: Sequence[Commit]) -> list[str | None]:
    """Return for each of these, the newest first, why it is passed over; None: it is not.

    The newest that is not, which will be chosen almost always, and those before it are asked about by the exact names
    of their marks, whatever a listing shows.
    """
    found: list[str | None] = []
    for commit in commits:
        listed = FAILED in line.marks.get(commit.attempt, ())
        found.append(why_failed(store, commit) if listed or all(found) else None)
    return found


def newest_unmarked(store: Store, line: Line, passed: Callable[[Commit, str], None]) -> Commit:
    """Return the newest checkpoint that nobody has marked failed, after telling ``passed`` of those before it.

    Raises:
        CorruptError: kind ``nothing-usable``: all of them are marked.
    """
    reasons = []
    for commit in line.commits:
        why = why_failed(store, commit)
        if why is None:
            return commit
        passed(commit, why)
        reasons.append(f"step {commit.step}: {why}")
    raise nothing_usable(store, reasons, marked=True)


def nothing_usable(store: Store, reasons: Sequence[str], *, marked: bool) -> CorruptError:
    """Return the error for a place whose checkpoints all cannot be used; ``marked``: some because they are marked."""
    undo = "`resilient mark good RUN@STEP` lets a run continue from one that is marked failed; " if marked else ""
    return CorruptError(
        f"{store.url}: there are checkpoints and none is usable: {'; '.join(reasons)}",
        kind=ErrorKind.NOTHING_USABLE,
        hint=f"{undo}`resilient verify` lists what is damaged; resume='never' starts over on purpose",
    )
