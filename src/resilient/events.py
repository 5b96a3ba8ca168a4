"""What happened: typed records on one bus; how they are shown is for `resilient.observe`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all records. ``rank`` is the global rank that reports."""

    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    url: str
    generation: int
    world_size: int
    resumed_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    step: int
    reason: str
    nbytes: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(Event):
    """The state is copied, and the writer has it: it will be saved also if this process is killed now.

    ``duration_s`` counts from the boundary.
    """

    step: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFenced(Event):
    """Before the state changed, training has waited ``waited_s`` for the copy to be over, besides the stall."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePersisted(Event):
    """``nbytes`` of the state are durable; ``sent`` were written, for ``cpu_s`` of the writer's processor time."""

    step: int
    nbytes: int
    sent: int
    cpu_s: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(Event):
    step: int
    nbytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """``failures``: so many saves in a row have failed on this rank."""

    step: int
    error: str
    failures: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUnchanged(Event):
    """No trained parameter differs from what it was at ``since``, although optimizers have stepped in between."""

    step: int
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStarted(Event):
    """This checkpoint is going to be read."""

    step: int
    generation: int
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    step: int
    generation: int
    saved_world_size: int
    nbytes_read: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredFromTiers(Event):
    """Where the bytes of a restore came from.

    ``sources``: bytes that all ranks together read, by the name of the tier or the URL of the store. ``shards``: for
    this rank, each data object with its source and the bytes that were read of it.
    """

    step: int
    sources: tuple[tuple[str, int], ...]
    shards: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersFinished(Event):
    """A state that was complete in the tiers of the nodes is committed now; ``nbytes`` were copied to the store."""

    step: int
    nbytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered(Event):
    """This rank's part of a state is in these tiers of its node; training was held up for ``stall_s``."""

    step: int
    nbytes: int
    cpu_s: float
    duration_s: float
    stall_s: float
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStake(Event):
    """What would be lost now: the steps since ``process_step`` with a process, those since ``node_step`` with a node.

    ``None``: all of them. The sources say where the state of that step is.
    """

    process_step: int | None
    process_source: str
    node_step: int | None
    node_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack(Event):
    """A newer checkpoint was not usable; an older one is taken."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demoted(Event):
    """The run has marked a checkpoint failed: two lives have failed alike soon after restoring it."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinstated(Event):
    """The run has taken that back: what fails without it too is not its fault."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """The run does not try again: the same failure has come back so often."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureExplained(Event):
    """Why an earlier generation failed, and what is done about it, said before it is done.

    ``failure`` and ``confidence`` as in `resilient.policy.failures`. ``at_rank`` and ``node``: where it began, if that
    is known. ``acts``: whether the run does that by itself; else it is advice.
    """

    generation: int
    failure: str
    confidence: str
    why: str
    at_rank: int | None
    node: str | None
    proof: tuple[str, ...]
    action: str
    because: str
    acts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFault(Event):
    """A step had sick numbers (``what``), and was run again ``reruns`` times.

    ``outcome``: "transient" (then it was fine), "reproducible" (the same bits again), "unstable" (sick, and different
    each time), or "not run again" (gradients of earlier turns would have been lost). ``ranks``: the lowest and the
    highest rank whose values were sick. ``action``: "go on", "report", "skip", "rollback" or "stop".
    """

    step: int
    outcome: str
    ranks: tuple[int, ...]
    what: str
    reruns: int
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDiffers(Event):
    """The replicas of some parameters are not the same on all ranks that hold them, at ``step``.

    ``ranks``: those in the minority; empty if there are two only, or as many of one kind as of the other.
    """

    step: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Event):
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """This rank was asked to ``stop``, or to make way for another number of nodes (``resize``); all ranks will.

    ``within_s``: so soon after that, somebody ends a process by force; None if nobody does.
    """

    kind: str
    why: str
    within_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """All ranks have stopped after ``step``, because of ``why``; ``error``: why that step is not saved, if it is not.

    ``newest``: the newest committed step, None if there is none.
    """

    step: int
    kind: str
    why: str
    error: str | None
    newest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterSilent(Event):
    """A symptom, no more: the interpreter of this rank has given no sign for ``silence_s``.

    ``kind``: "silent" (its lock is held, which a healthy step may do too), "stopped" (by a signal or a debugger), or
    "heard": it does again. A rank can tell this only afterwards; its watcher writes it down at once.
    """

    kind: str
    section: str
    step: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFound(Event):
    """This rank has been in ``section`` for ``age_s``, and ``timeout_s`` are usual at most.

    ``cause``: the rank that all others wait for, and in which section, ``why``; None where that cannot be told.
    """

    section: str
    step: int
    age_s: float
    timeout_s: float
    cause: int | None
    cause_section: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOver(Event):
    """What was reported as a hang was none, or is over: the section has ended."""

    section: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound(Event):
    """A rank holds up the others: in ``section`` it needs ``own_s`` (median), the fastest one ``best_s``.

    ``reports``: so many in a row have said so.
    """

    straggler: int
    section: str
    own_s: float
    best_s: float
    reports: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken(Event):
    """``steps`` turns of the loop have ended since this was said last, the last one with ``step`` complete.

    Sums in seconds: ``turn_s`` without what was within named sections, of which ``data_s`` was waiting for batches;
    and ``save_s`` being held up by saves. ``ended_s``: when the last turn ended, unix seconds; 0 if that is not known.
    """

    step: int
    steps: int
    turn_s: float
    data_s: float
    save_s: float
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """The training function has been left on this rank, after ``step``: "done", "stopped" or "failed", by ``error``."""

    step: int
    how: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture(Event):
    """What a step of this rank is spent on, seconds a step, the median of ``steps`` that were looked at since the last.

    ``exchange_s``: in collectives while nothing is computed. ``optimizer_s``: in ``step`` of optimizers. What is left
    of ``step_s`` is ``compute_s``.
    """

    step: int
    steps: int
    step_s: float
    compute_s: float
    exchange_s: float
    data_s: float
    optimizer_s: float
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSampled(Event):
    """What this node did, sampled every ``period_s`` from ``began_s`` (unix seconds) on, by one rank of each node.

    ``values``: by name, as in `resilient.report.model.MachineSeries`; NaN where a sample is missing.
    """

    host: str
    began_s: float
    period_s: float
    values: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck(Event):
    """One sentence: what a step is spent on most, and which link limits it where that can be told."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMissed(Event):
    """The share of productive time that was promised is not delivered; ``largest``: what takes the most of the rest."""

    promised: float
    delivered: float
    largest: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLooked(Event):
    """The share of productive time so far, ``delivered``, was looked at, where a share is ``promised``."""

    promised: float
    delivered: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Something that a person should know and nothing acts on."""

    message: str


Sink = Callable[[Event], None]


class Bus:
    """Hands every record to every sink, in the thread that reports it. A sink must be quick and must not raise."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Add a sink; return what removes it again."""
        with self._lock:
            self._sinks = (*self._sinks, sink)

        def unsubscribe() -> None:
            with self._lock:
                self._sinks = tuple(each for each in self._sinks if each is not sink)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)
