"""What the coordinator of a DCP save decides: which step, in which generation, and whether it is committed."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass

from resilient.catalog.commit import try_commit
from resilient.catalog.generations import claim_generation, newest_number, write_base
from resilient.catalog.launch import check_no_other_launch
from resilient.catalog.line import Line, read_line
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ConflictError, ErrorKind
from resilient.format.documents import Claim, Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store
from resilient.store.probe import probe
from resilient.writer.proving import find_void


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a rank has to know of the save that it takes part in."""

    attempt: Attempt
    rank: int
    world_size: int


class Attempts:
    """The attempts that one writer makes in one place, as its coordinator.

    A generation serves for as long as it is the newest, the world size is the same, and steps go up: a step that is
    tried again, whether it was saved or not, is another attempt in another generation.
    """

    def __init__(self, store: Store, *, overwrite: bool) -> None:
        self._store = store
        self._overwrite = overwrite
        self._launch = uuid.uuid4().hex
        self._claim: Claim | None = None
        self._tried = -1
        self._lock = threading.Lock()

    def begin(self, step: int | None, world_size: int) -> Attempt:
        """Return a new attempt; the step is the one after the newest if it is None.

        What is there counts until the attempt is committed, also if it is of the same step.

        Raises:
            ConflictError: a later step is there and ``overwrite`` is not set, or a training run lives there.
        """
        with self._lock:
            return self._begin(step, world_size)

    def commit(self, attempt: Attempt, world_size: int) -> Commit:
        """Commit an attempt of which all ranks have written their receipts.

        Raises:
            ConflictError: they leave a hole or contradict each other, or another job has taken over.
        """
        outcome = try_commit(
            self._store, attempt, world_size=world_size, committer=0, reason="dcp.save", clock=SYSTEM_CLOCK
        )
        if not isinstance(outcome, Commit):
            raise ConflictError(
                f"{attempt} is not committed: no receipt from rank {', '.join(map(str, outcome))}",
                kind=ErrorKind.INCOMPLETE,
                hint="all ranks must reach the same place with their StorageWriter",
            )
        void = find_void(self._store, outcome)
        if void is not None:
            raise void
        return outcome

    def _begin(self, step: int | None, world_size: int) -> Attempt:
        store, claim = self._store, self._claim
        if claim is None:
            open_run(store, create=True, clock=SYSTEM_CLOCK)
            probe(store)
        line = read_line(store)
        chosen = self._chosen(line, step)
        serves = claim is not None and claim.world_size == world_size and chosen > self._tried
        if claim is None or not serves or newest_number(store) != claim.generation:
            check_no_other_launch(store, launch=self._launch, takeover=False, clock=SYSTEM_CLOCK)
            claim = claim_generation(store, world_size=world_size, launch=self._launch, heartbeat=False)
            write_base(store, claim, next((commit for commit in line.commits if commit.step <= chosen), None))
        self._claim, self._tried = claim, chosen
        return Attempt(step=chosen, generation=claim.generation, nonce=claim.nonce)

    def _chosen(self, line: Line, step: int | None) -> int:
        newest = max((commit.step for commit in line.commits), default=0)
        if step is None:
            return max(newest, self._tried) + 1
        if step < newest and not self._overwrite:
            raise ConflictError(
                f"{self._store.url}: step {newest} is there already, and step {step} is not after it",
                kind=ErrorKind.ALREADY_SAVED,
                hint="save a later step or to another place; with overwrite=True the later steps count no longer",
            )
        return step
