"""Whether this node may take part in a job: checked before it joins, and after each attempt, and written down.

A node that computes wrongly or whose device is dying spoils or ends the attempts of all others, again and again. What
can be known about it without the others is known in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import quote

import msgspec

from resilient.catalog.evidence import explain_generation, load_rules, read_evidence
from resilient.catalog.generations import newest_number
from resilient.catalog.line import read_line
from resilient.catalog.once import read_or_none
from resilient.check import kernel_log, nvidia
from resilient.check.context import Level
from resilient.check.result import Result, Status
from resilient.check.suite import CHECKS, Check, run_checks
from resilient.clock import Clock, rfc3339
from resilient.config import Settings
from resilient.elastic.documents import decode, encode
from resilient.errors import ConflictError, ErrorKind, StoreError
from resilient.format import layout
from resilient.observe.logs import LOGGER
from resilient.policy.failures.actions import Budgets
from resilient.policy.failures.classes import ABOUT, Action, Owner
from resilient.policy.failures.verdict import Confidence
from resilient.store.base import Store

Run = Callable[[Level, Sequence[Check]], list[Result]]

_RULING: Final = frozenset({"kernel-log", "nvidia", "processor", "memory", "accelerator"})
"""What these find spoils the work of all; what others find, and that one could not be made, may be nobody's loss."""

_QUICK: Final = frozenset({"kernel-log", "nvidia", "pcie", "shared-memory", "rdma"})
"""What takes no second, for between two attempts."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was last found about a node: ``control/nodes/<host>``. ``occasion``: before joining, or after an attempt."""

    host: str
    job: str
    status: Status
    occasion: str
    created: str
    findings: tuple[Result, ...] = ()  # what was not as it should be
    excluded: str = ""  # why it takes no more part in this job, if so


class Fitness:
    """The checks of one node for one job."""

    def __init__(self, store: Store, host: str, job: str, *, clock: Clock, run: Run | None = None) -> None:
        """``run`` makes checks; by default `run_checks`."""
        self._store = store
        self._host = host
        self._job = job
        self._clock = clock
        self._run = run if run is not None else _checked

    def before_joining(self) -> None:
        """Make all light checks: some seconds.

        Raises:
            ConflictError: kind ``unfit-node``: this node must not take part; it says why, and what to do.
        """
        with suppress(StoreError):
            before = read_record(self._store, self._host)
            if before is not None and before.job == self._job and before.excluded:
                raise self._out(before.excluded)  # once ruled out, out for the rest of the job, as in SCR
        self._examine("before joining", CHECKS)

    def after_attempt(self, settings: Settings, *, has_spare: bool) -> None:
        """Look at what may have changed in an attempt, in about a second; raises what `before_joining` does.

        Where the failure of the attempt began here and may be the platform's, all is looked at, thoroughly. Where it is
        one for which a node is to be left out, this one stays out, if the job can go on without it (``has_spare``).
        """
        suspected = False
        with suppress(StoreError):
            suspected = self._heed(settings, has_spare=has_spare)
        if suspected:
            self._examine("after a failure that may be its own", CHECKS, "full")
        else:
            self.after_job()

    def after_job(self) -> None:
        """Look at the same after the last attempt; raises what `before_joining` does."""
        self._examine("after an attempt", [check for check in CHECKS if check.name in _QUICK])

    def _heed(self, settings: Settings, *, has_spare: bool) -> bool:
        """Say whether the last failure began on this node, and may be the platform's."""
        generation = newest_number(self._store)
        if settings.policy != "act" or generation == 0 or not read_evidence(self._store, generation):
            return False  # as after a resize: nothing has failed
        explained = explain_generation(
            self._store,
            generation,
            read_line(self._store),
            rules=load_rules(settings.rules),
            budgets=Budgets(attempts=settings.max_failed_attempts, spares=int(has_spare)),
        )
        if explained is None or explained.verdict.node != self._host:
            return False
        verdict = explained.verdict
        proof = verdict.proof[0] if verdict.proof else verdict.why
        why = f"generation {generation} failed by {verdict.failure} here: {proof}"
        if explained.decision.action is not Action.EXCLUDE_NODE:
            return ABOUT[verdict.failure].owner is not Owner.USER and verdict.confidence is not Confidence.POSSIBLE
        if not has_spare:
            LOGGER.warning("this node should be left out, and the job cannot go on without it: %s", why)
            return True
        self._keep("after an attempt", Status.FAILED, (), excluded=why)
        raise self._out(why)

    def _out(self, why: str) -> ConflictError:
        key = node_key(self._host)
        return ConflictError(
            f"this node ({self._host}) takes no more part in the job {self._job}: {why}",
            kind=ErrorKind.UNFIT_NODE,
            hint=f"have it tested (`resilient check --level full`); another job takes it, or this one once {key} is"
            f" removed from {self._store.url}; RESILIENT_POLICY=observe excludes nobody",
        )

    def _examine(self, occasion: str, checks: Sequence[Check], level: Level = "light") -> None:
        try:
            ruling = self._run(level, [check for check in checks if check.name in _RULING])
            telling = self._run(level, [check for check in checks if check.name not in _RULING])
        except OSError as error:  # no process could be started, or no file made: that says nothing of the node
            LOGGER.warning("this node could not be examined %s: %s", occasion, error)
            return
        unfit = _unfit(ruling)
        found = [each for each in (*ruling, *telling) if each.status in (Status.FAILED, Status.SLOW)]
        status = Status.FAILED if unfit else Status.SLOW if found else Status.OK
        self._keep(occasion, status, found)
        for each in found:
            LOGGER.warning("this node, %s: %s %s: %s; %s", occasion, each.name, each.status, each.line, each.remedy)
        if unfit:
            first = unfit[0]
            raise ConflictError(
                f"this node ({self._host}) is not fit to take part: {first.name}: {first.line}",
                kind=ErrorKind.UNFIT_NODE,
                hint=f"{first.remedy}; `resilient check` shows all; --rdzv-conf=check=off joins all the same",
            )

    def _keep(self, occasion: str, status: Status, found: Sequence[Result], *, excluded: str = "") -> None:
        record = NodeRecord(
            host=self._host,
            job=self._job,
            status=status,
            occasion=occasion,
            created=rfc3339(self._clock.now()),
            findings=tuple(found),
            excluded=excluded,
        )
        with suppress(StoreError):  # a record is no reason to keep a healthy node from joining
            self._store.put(node_key(self._host), [encode(record)])


def _unfit(ruling: Sequence[Result]) -> list[Result]:
    """Return the faults for which a node has to stay out.

    What the kernel's log tells of devices counts together with the driver: they may have been reset since, or be
    another job's.
    """
    failures = [each for each in ruling if each.status is Status.FAILED]
    devices = any(each.name == nvidia.NAME for each in failures)
    return [each for each in failures if (devices if each.name == kernel_log.NAME else not each.doubtful)]


def read_record(store: Store, host: str) -> NodeRecord | None:
    """Return what was last found about a node; None if nothing was, or it does not parse."""
    key = node_key(host)
    data = read_or_none(store, key)
    return None if data is None else decode(NodeRecord, data, key)


def node_key(host: str) -> str:
    return f"{layout.CONTROL}nodes/{quote(host, safe='')}"


def _checked(level: Level, checks: Sequence[Check]) -> list[Result]:
    return run_checks(level, checks=checks)
