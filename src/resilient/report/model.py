"""What a report is made of: a run's time, split by cause; its generations, incidents, saves and restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Part(StrEnum):
    """What an instant of a run was spent on. Every instant belongs to one part, so the parts sum to the wall clock.

    The classes of Google's goodput library, with what one step's time is spent on apart. Append only.
    """

    COMPUTE = "compute"
    EXCHANGE = "exchange wait"
    DATA = "data wait"
    OUTSIDE = "outside the loop"
    SAVE = "save stall"
    RESTORE = "restore"
    START = "start-up"
    LOST = "lost work"
    DETECTION = "detection"
    REFORMATION = "re-formation"
    IDLE = "idle"


PRODUCTIVE: Final = frozenset({Part.COMPUTE, Part.EXCHANGE, Part.DATA, Part.OUTSIDE})
"""What counts as training: steps that were kept, however well they used the hardware. The rest is badput.

ETTR, the effective training time ratio, is their share of the wall clock (Kokolis et al., "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", arXiv 2410.21680).
"""

Parts = Mapping[Part, float]
"""Seconds of wall clock by part; of several ranks, their mean. What is not there is 0."""


class End(StrEnum):
    """How a generation has ended."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTime:
    """One life of the run. Times are unix seconds (``at_s``, ``began_s``) or durations (the rest).

    ``began_s`` is when its first process was started, ``ended_s`` when its last one was gone (or the last sign of it);
    ``parts`` sum to their difference. ``resumed_step``: None for a fresh start. ``last_step``: complete at the end.
    ``kept_step``: where the next generation went on, so that the steps after it were lost; None for the newest one.
    """

    generation: int
    nonce: str
    world_size: int
    hosts: tuple[str, ...]
    began_s: float
    ended_s: float
    resumed_step: int | None
    last_step: int
    kept_step: int | None
    end: End
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure: what it was, and what it cost.

    ``generation``: the one that failed. ``at_s``: when it began, unix seconds. ``failure``, ``confidence``, ``why``,
    ``proof``, ``action`` and ``because``: as in `resilient.events.FailureExplained`; ``failure`` is "unknown" where
    nobody has said. ``parts``: the cost in seconds, by part: work lost, detection, re-formation, start-up, restore.
    ``resumed_step``: None if nothing has come after it (yet), or afresh. ``sources``: bytes read by tier or store, for
    what came back.
    """

    at_s: float
    generation: int
    failure: str
    confidence: str
    rank: int | None
    node: str | None
    why: str
    proof: tuple[str, ...]
    action: str
    because: str
    last_step: int
    resumed_step: int | None
    lost_steps: int
    parts: Parts
    sources: tuple[tuple[str, int], ...] = ()

    @property
    def cost_s(self) -> float:
        """What it cost in all, in seconds of wall clock of the whole job."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTime:
    """One save, as rank 0 saw it; ``at_s`` is when it began. None: that has not happened (yet).

    ``stall_s``: how long training was held up, the wait at the fence included. ``persist_s``, ``commit_s``: from its
    beginning. ``sent``: bytes written by rank 0, ``nbytes`` those of its state. ``error``: why it failed.
    """

    at_s: float
    generation: int
    step: int
    reason: str
    nbytes: int
    stall_s: float
    persist_s: float | None = None
    commit_s: float | None = None
    sent: int | None = None
    cpu_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTime:
    """One restore, as rank 0 saw it; ``sources``: bytes that all ranks read, by tier or store."""

    at_s: float
    generation: int
    step: int
    nbytes: int
    duration_s: float
    sources: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureTime:
    """What steps of one rank were spent on, seconds a step; as `resilient.events.StepPicture`."""

    at_s: float
    generation: int
    rank: int
    step: int
    step_s: float
    compute_s: float
    exchange_s: float
    data_s: float
    optimizer_s: float
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeries:
    """What one node did, on one time axis: values at ``began_s + i * period_s``; a name only where it can be read.

    Names: ``cpu`` (share of all processors, 0 to 1), ``power_w`` (all accelerators together), ``sent_Bps`` and
    ``received_Bps`` (bytes a second of all links), ``accelerator`` (mean utilization, 0 to 1). NaN: no sample.
    """

    host: str
    generation: int
    began_s: float
    period_s: float
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stake:
    """What would be lost now, as `resilient.events.AtStake`, with the time that it stands for; None: all of it."""

    what: str
    """ "a process", "a node" or "the job"."""
    step: int | None
    source: str
    lost_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Anything else worth a mark on the time axis: demotions, stragglers, hangs, replicas that differ, stops."""

    at_s: float
    generation: int
    rank: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A promised share of productive time, what was delivered, and what took the most of the rest."""

    promised: float
    delivered: float
    largest: Part | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A run's time, from the start of its first process to ``as_of_s``; ``parts`` sum to ``wall_s``.

    ``ettr_hours``: for each point of time (unix seconds), the ETTR of the hour before it. ``missing``: what should be
    there and is not, in words; an account with gaps says so.
    """

    url: str
    run_id: str
    began_s: float
    as_of_s: float
    step: int
    parts: Parts
    generations: tuple[GenerationTime, ...]
    incidents: tuple[Incident, ...] = ()
    saves: tuple[SaveTime, ...] = ()
    restores: tuple[RestoreTime, ...] = ()
    pictures: tuple[PictureTime, ...] = ()
    machines: tuple[MachineSeries, ...] = ()
    stakes: tuple[Stake, ...] = ()
    notes: tuple[Note, ...] = ()
    ettr_hours: tuple[tuple[float, float], ...] = ()
    bottleneck: str = ""
    promise: Promise | None = None
    missing: tuple[str, ...] = field(default=())

    @property
    def wall_s(self) -> float:
        """Seconds from the beginning to the end of the account."""
        return self.as_of_s - self.began_s

    @property
    def ettr(self) -> float:
        """The share of the wall clock that went into steps that were kept; 0 of a run that has no time yet."""
        return ettr_of(self.parts)


def ettr_of(parts: Parts) -> float:
    """Return the effective training time ratio of an account."""
    wall_s = sum(parts.values())
    return sum(seconds for part, seconds in parts.items() if part in PRODUCTIVE) / wall_s if wall_s > 0 else 0.0
