"""What a writer does with a save that it was ordered: persist, commit, prove, prune, and say so."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from resilient.catalog.line import read_line
from resilient.catalog.prune import prune, retained
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ErrorKind, ResilientError, StoreError
from resilient.format.documents import Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store, Sweepable
from resilient.store.retrying import Retrying
from resilient.writer.committing import Committer
from resilient.writer.messages import (
    Answer,
    Committed,
    Failed,
    Fault,
    Noticed,
    Open,
    Persisted,
    Pruned,
    Save,
    Structure,
)
from resilient.writer.outline import Outline
from resilient.writer.persisting import Persister, Staged
from resilient.writer.proving import find_void
from resilient.writer.slot import Slot

_STRUCTURES: Final = 32
"""How many are kept, those that were used last. A state that changes its shape at every save must not fill the memory.
"""

_PATIENCE: Final = 0.5
"""The share of a save's time for which one call to the store is repeated: a store may be away for minutes, and what is
left is for the commit."""

_UNFINISHED_FOR: Final = timedelta(days=1)
"""A file that nobody has written to for so long has no writer any more, however wrong the clock of a machine is."""


class Worker:
    """Carries out the saves of one rank and one generation, one after another, and says how each ends.

    A save that fails leaves the worker as it was: the next one is made as usual.
    """

    def __init__(
        self,
        store: Store,
        opened: Open,
        slots: Sequence[Slot],
        say: Callable[[Answer], None],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if isinstance(store, Retrying):
            store = store.within(_PATIENCE * opened.commit_timeout_s)
        self._store = store
        self._opened = opened
        self._slots = slots
        self._say = say
        self._clock = clock
        self._outlines: dict[int, Outline] = {}
        self._committer = Committer(store, opened, clock=clock)
        self._persister = Persister(store, opened, clock=clock, orphaned=lambda: self._committer.orphaned)
        self._swept = False

    def define(self, structure: Structure) -> None:
        """Learn a structure, for the saves that follow."""
        self._keep(Outline(structure))

    def abandon(self, step: int, why: str) -> None:
        """Stop waiting for a step that another rank cannot save; may be called from any thread."""
        self._committer.abandon(step, why)

    def leave(self) -> None:
        """Take note that the trainer is gone; may be called from any thread."""
        self._committer.leave()

    def save(self, order: Save) -> None:
        """Carry out a save."""
        attempt = Attempt(step=order.step, generation=self._opened.generation, nonce=self._opened.nonce)
        persisted = False
        try:
            self._persist(order, attempt)
            persisted = True
            commit = self._committer.commit(attempt, order.reason, order.metrics)
            self._prove(commit)
        except Exception as error:  # noqa: BLE001 -- boundary: whatever fails a save is said, and the next one is made
            fault = _fault(error)
            self._say(Failed(step=order.step, slot=order.slot, persisted=persisted, error=fault))
            if fault.kind in (ErrorKind.NO_SPACE, ErrorKind.PEER_FAILED):
                self._prune()  # what was given up before still takes up the space
        else:
            self._persister.committed(attempt)
            self._say(Committed(step=commit.step, nbytes=commit.nbytes))
            self._persister.give_up_older(attempt)
            self._prune()  # raises nothing: the save is over
        finally:
            self._committer.forget(order.step)

    def _keep(self, outline: Outline) -> Outline:
        self._outlines.pop(outline.number, None)
        self._outlines[outline.number] = outline
        while len(self._outlines) > _STRUCTURES:
            del self._outlines[next(iter(self._outlines))]
        return outline

    def _persist(self, order: Save, attempt: Attempt) -> None:
        started_cpu_s = _cpu_s()
        outline = self._keep(self._outlines[order.structure])
        staged = Staged(order=order, attempt=attempt, outline=outline, slot=self._slots[order.slot])
        sent = self._persister.persist(staged)
        answer = Persisted(
            step=order.step,
            slot=order.slot,
            nbytes=outline.stored_nbytes,
            sent=sent,
            cpu_s=_cpu_s() - started_cpu_s,
            changed=self._persister.changed,
        )
        self._say(answer)

    def _prove(self, commit: Commit) -> None:
        """Raise if the commit does not count, and say so if that cannot be found out: it is committed all the same."""
        if self._opened.rank != 0:
            return
        try:
            void = find_void(self._store, commit)
        except Exception as error:
            if isinstance(error, ResilientError) and not isinstance(error, StoreError):
                raise  # what was found, and not that nothing could be
            what = f"{commit.attempt} is committed; whether it counts could not be checked"
            self._say(Noticed(message=f"{what}: {_told(error)}"))
            return
        if void is not None:
            raise void

    def _prune(self) -> None:
        """Apply retention. A failure here is not a failure of the save: it is said, and the next save tries again.

        Not without a trainer: a later life may be about to choose where it continues, and prunes itself.
        """
        if self._opened.keep is None or self._opened.rank != 0 or self._committer.orphaned:
            return
        try:
            self._sweep()
            line = read_line(self._store)
            done = prune(self._store, line, retained(line, self._opened.keep), clock=self._clock)
        except Exception as error:  # noqa: BLE001 -- boundary: the store may be the user's own, and raise anything
            self._say(Noticed(message=f"old checkpoints could not be pruned: {_told(error)}"))
            return
        if done.steps:
            self._say(Pruned(steps=done.steps))

    def _sweep(self) -> None:
        """Remove, once in this life, what killed writers have left half-written."""
        if not self._swept and isinstance(self._store, Sweepable):
            self._swept = True
            self._store.sweep(self._clock.now() - _UNFINISHED_FOR)


def _fault(error: Exception) -> Fault:
    if isinstance(error, ResilientError):
        return Fault.of(error)
    return Fault(name="ResilientError", message=_told(error), kind=ErrorKind.SAVE_FAILED)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ResilientError) else f"{type(error).__name__}: {error}"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
