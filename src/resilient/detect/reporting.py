"""What a watcher does when its rank hangs: keep the evidence of the whole node, then say which rank is the cause."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from resilient.catalog.standing import standing
from resilient.clock import Clock, Deadline
from resilient.detect import proc
from resilient.detect.page import PageView
from resilient.detect.standing import take_all
from resilient.detect.words import PAGE, Hung, Task
from resilient.format.hangs import Hang
from resilient.policy.progress import HangVerdict, Overdue, Standing, first_cause

_REPORTED: Final = "reported"
_ENDED: Final = "ended"
_GONE: Final = ("", "Z", "X")
_ELSEWHERE_S: Final = 10.0
"""For how long the records of other nodes are waited for: their ranks hang as well, and are found about then."""

_AGAIN_S: Final = 2.0
_LOCK_S: Final = 30.0
_POLL_S: Final = 0.2


class Reporting:
    """One report for each hang of a node, by the watcher that finds it first."""

    def __init__(self, task: Task, *, clock: Clock) -> None:
        self._task = task
        self._clock = clock
        self._folder = Path(task.folder)
        self._kept: list[Hang] = []

    def note_end(self) -> None:
        """Let nobody on this node take back what is kept of a hang: a rank is ended because of it."""
        with suppress(OSError):  # the others then see that its process is gone
            (self._folder / _ENDED).touch()

    def withdraw(self) -> None:
        """Take back what is kept of a hang that is over: it would explain a later end of the generation.

        But not if it is over because a rank was ended, by a watcher or by a person: then it explains that very end.
        """
        kept, self._kept = self._kept, []
        if not kept or self._task.url is None:
            return
        if (self._folder / _ENDED).exists() or any(proc.state(each.pid) in _GONE for each in kept):
            return
        from resilient.catalog.hangs import remove_hang  # noqa: PLC0415 -- as in `_keep`
        from resilient.store.open import open_store  # noqa: PLC0415

        with suppress(Exception):  # a store that is away keeps an old word: that is no reason to stop watching
            store = open_store(self._task.url, storage_options=self._task.options).within(_ELSEWHERE_S)
            try:
                for each in kept:
                    remove_hang(store, each)
            finally:
                store.close()

    def report(self, overdue: Overdue, mark: int) -> tuple[Hung, list[Hang]]:
        """Keep the evidence, unless another watcher of this node has since this rank began what it hangs in.

        Returns:
            What is to be said, and where the ranks of this node stand.
        """
        with self._alone():
            told = self._told()
            if told.marks.get(str(self._task.rank)) == mark and told.hung is not None:
                # Who reported it may wait for this rank: that this one waits as well would keep all of them for ever.
                waits = told.hung.waits and told.hung.cause != self._task.rank
                hung = msgspec.structs.replace(told.hung, covered=True, waits=waits, **_own(overdue))
                return hung, []
            hangs = take_all(self._task, socket.gethostname(), self._task.rank, self._clock)
            verdict, kept = self._judge(hangs)
            at = next((each for each in hangs if each.rank == verdict.rank and each.rank != self._task.rank), None)
            hung = Hung(
                cause=verdict.rank,
                cause_section=verdict.section,
                why=verdict.why,
                kept=kept,
                waits=at is not None and at.section != overdue.section and at.age_s <= at.timeout_s,
                **_own(overdue),
            )
            with suppress(OSError):  # the other watchers of this node then report as well
                self._tell(hung)
            return hung, hangs

    def _judge(self, hangs: Sequence[Hang]) -> tuple[HangVerdict, str]:
        """Return which rank is the cause, and why that is not kept, if it is not."""
        task = self._task
        known = {each.rank: standing(each) for each in hangs}
        verdict = first_cause(list(known.values()), task.world_size)
        if task.url is None:
            return verdict, "the store is this process's own"
        try:
            known = self._keep(task.url, hangs)
        except Exception as error:  # noqa: BLE001 -- whatever a store's client raises: the hang is to be told all the same
            return verdict, f"{type(error).__name__}: {error}"
        return first_cause(list(known.values()), task.world_size), ""

    def _keep(self, url: str, hangs: Sequence[Hang]) -> dict[int, Standing]:
        """Keep the evidence of this node, and return it with that of all others that comes in time."""
        # Not before it is needed: a watcher should take little memory, and numpy alone takes 20 MiB.
        from resilient.catalog.hangs import keep_hang, read_hangs  # noqa: PLC0415
        from resilient.store.open import open_store  # noqa: PLC0415

        task = self._task
        store = open_store(url, storage_options=task.options).within(_ELSEWHERE_S)
        try:
            for each in hangs:
                keep_hang(store, each)
            self._kept = list(hangs)
            known = {each.rank: standing(each) for each in hangs}
            deadline = Deadline(self._clock, _ELSEWHERE_S)
            while len(known) < task.world_size:
                known |= {each.rank: standing(each) for each in read_hangs(store, task.generation, but=known)}
                if deadline.expired:
                    break
                self._clock.sleep(min(_AGAIN_S, deadline.remaining_s))
            return known
        finally:
            store.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other watcher of this node reports, for a while: one that hangs must not keep the others."""
        try:
            file = os.open(self._folder / ".reporting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield  # nothing can be made there any more: several may report
            return
        try:
            deadline = Deadline(self._clock, _LOCK_S)
            while not deadline.expired:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._clock.sleep(_POLL_S)
            yield
        finally:
            os.close(file)

    def _told(self) -> _Told:
        try:
            return msgspec.json.decode((self._folder / _REPORTED).read_bytes(), type=_Told)
        except (OSError, msgspec.MsgspecError):
            return _Told()

    def _tell(self, hung: Hung) -> None:
        partial = self._folder / f".{_REPORTED}-{self._task.rank}"
        partial.write_bytes(msgspec.json.encode(_Told(hung=hung, marks=_marks(self._folder))))
        partial.replace(self._folder / _REPORTED)


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of this node, and where each rank was then."""

    hung: Hung | None = None
    marks: dict[str, int] = {}


def _own(overdue: Overdue) -> dict[str, Any]:
    return {
        "section": overdue.section,
        "step": overdue.step,
        "age_s": round(overdue.age_s, 3),
        "timeout_s": overdue.timeout_s,
    }


def _marks(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.glob(f"{PAGE}*"):
        with suppress(OSError, ValueError):
            view = PageView(path)
            found[str(view.owner.rank)] = view.glance().mark
            view.close()
    return found


def in_words(rank: int, hung: Hung) -> str:
    """Return what a person should read of a hang."""
    cause = f"rank {hung.cause} hangs in {hung.cause_section or '?'}" if hung.cause is not None else "the cause is open"
    own = f"rank {rank} is in {hung.section} after step {hung.step} for {hung.age_s:.0f} s ({hung.timeout_s:.0f} s are"
    kept = f"; the stacks are not kept: {hung.kept}" if hung.kept else "; the stacks of all local ranks are kept"
    return f"{own} usual at most): {cause} ({hung.why}){kept}"
