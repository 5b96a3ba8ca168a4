"""What the events of one rank add up to: numbers under the documented names."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Final

from resilient import events
from resilient.observe.names import BUCKETS_S

COMPUTE: Final = "compute"
EXCHANGE: Final = "exchange wait"
DATA: Final = "data wait"
SAVE: Final = "save stall"

Key = tuple[str, tuple[str, ...]]
"""A name, and the values of its labels."""

_ZEROS: Final[tuple[Key, ...]] = (
    *((name, ()) for name in (
        "resilient_steps_total", "resilient_save_fence_seconds_total", "resilient_save_bytes_total",
        "resilient_tier_bytes_total", "resilient_demotions_total", "resilient_fallbacks_total", "resilient_hangs_total",
        "resilient_hung", "resilient_stragglers_total", "resilient_replica_mismatches_total", "resilient_stop_asked",
    )),
    *(("resilient_time_seconds_total", (part,)) for part in (COMPUTE, EXCHANGE, DATA, SAVE)),
    *(("resilient_saves_total", (outcome,)) for outcome in ("committed", "failed", "skipped")),
    *(
        ("resilient_numeric_faults_total", (outcome,))
        for outcome in ("transient", "reproducible", "unstable", "not run again")
    ),
)  # fmt: skip
"""What is 0 and not unknown at the start: a rate is only seen of what was there before it rose."""


@dataclass(slots=True)
class Histogram:
    """``counts``: how many values were in each bucket of `BUCKETS_S`, and above the last one."""

    counts: list[int]
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """All numbers of one instant."""

    values: Mapping[Key, float]
    histograms: Mapping[Key, Histogram]


class Measures:
    """A sink that counts, for one life of one rank; `read` gives what it has come to. A few microseconds an event."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that reports runs within whatever this thread is doing.
        self._lock = threading.RLock()
        self._values: dict[Key, float] = dict.fromkeys(_ZEROS, 0.0)
        self._histograms: dict[Key, Histogram] = {}
        self._exchange_share = 0.0  # of the time that is neither data wait nor save stall
        self._fenced_s = 0.0  # waits at the fence: within turns, and part of what was held up by saves
        self._step = 0
        self._kept: dict[str, int] = {}  # by what would be lost: the step since which it would be

    def __call__(self, event: events.Event) -> None:
        """Count one event; most kinds count for nothing."""
        with self._lock:
            self._count(event)

    def read(self) -> Reading:
        """Return copies of all numbers, as of one instant."""
        with self._lock:
            values = dict(self._values)
            for what, since in self._kept.items():
                values["resilient_at_stake_steps", (what,)] = max(0, self._step - since)
            histograms = {key: Histogram(list(each.counts), each.total_s) for key, each in self._histograms.items()}
        return Reading(values, histograms)

    @singledispatchmethod
    def _count(self, event: events.Event) -> None:
        """Nothing: by kind of event, see below."""

    # --- by kind of event ---------------------------------------------------------------------------------------------

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name, labels] = value

    def _add(self, name: str, value: float, *labels: str) -> None:
        key = name, labels
        self._values[key] = self._values.get(key, 0.0) + value

    def _observe(self, name: str, value_s: float, *labels: str) -> None:
        histogram = self._histograms.get((name, labels))
        if histogram is None:
            histogram = self._histograms[name, labels] = Histogram([0] * (len(BUCKETS_S) + 1))
        histogram.counts[bisect_left(BUCKETS_S, value_s)] += 1
        histogram.total_s += value_s

    def _reach(self, step: int) -> None:
        self._step = step
        self._set("resilient_step", step)

    @_count.register
    def _started(self, event: events.GenerationStarted) -> None:
        self._set("resilient_generation", event.generation)
        self._set("resilient_world_size", event.world_size)
        self._reach(event.resumed_step or 0)
        if event.rank == 0:  # the only one that hears of all tiers
            self._kept = dict.fromkeys(("process", "node", "job"), self._step)
        if event.resumed_step is not None:
            self._set("resilient_saved_step", event.resumed_step)

    @_count.register
    def _steps_taken(self, event: events.StepsTaken) -> None:
        self._reach(event.step)
        self._add("resilient_steps_total", event.steps)
        rest_s = max(0.0, event.turn_s - event.data_s)
        # Stalls are outside of turns, waits at the fence within them: those count as save stall, and once. What is told
        # of a turn before it has ended waits for the report that has it.
        fenced_s = min(self._fenced_s, rest_s, event.save_s)
        self._fenced_s -= fenced_s
        rest_s -= fenced_s
        if event.steps:
            self._set("resilient_step_seconds", (event.turn_s + event.save_s - fenced_s) / event.steps)
        exchange_s = self._exchange_share * rest_s
        parts = (COMPUTE, rest_s - exchange_s), (EXCHANGE, exchange_s), (DATA, event.data_s), (SAVE, event.save_s)
        for part, spent_s in parts:
            self._add("resilient_time_seconds_total", max(0.0, spent_s), part)

    @_count.register
    def _pictured(self, event: events.StepPicture) -> None:
        rest_s = event.compute_s + event.exchange_s + event.optimizer_s
        self._exchange_share = min(1.0, event.exchange_s / rest_s) if rest_s > 0 else 0.0
        parts = {
            "compute": event.compute_s,
            "exchange": event.exchange_s,
            "data": event.data_s,
            "optimizer": event.optimizer_s,
            "save": event.save_s,
        }
        for part, spent_s in parts.items():
            self._set("resilient_step_part_seconds", spent_s, part)

    @_count.register
    def _save_started(self, event: events.SaveStarted) -> None:
        self._reach(max(self._step, event.step))
        self._observe("resilient_save_stall_seconds", event.stall_s, "store")

    @_count.register
    def _fenced(self, event: events.SaveFenced) -> None:
        self._add("resilient_save_fence_seconds_total", event.waited_s)
        self._fenced_s += event.waited_s

    @_count.register
    def _persisted(self, event: events.SavePersisted) -> None:
        self._observe("resilient_save_persist_seconds", event.duration_s)
        self._add("resilient_save_bytes_total", event.sent)

    @_count.register
    def _committed(self, event: events.SaveCommitted) -> None:
        self._add("resilient_saves_total", 1, "committed")
        self._observe("resilient_save_commit_seconds", event.duration_s)
        self._set("resilient_saved_step", event.step)
        for what, since in self._kept.items():
            self._kept[what] = max(since, event.step)

    @_count.register
    def _failed(self, _: events.SaveFailed) -> None:
        self._add("resilient_saves_total", 1, "failed")

    @_count.register
    def _skipped(self, _: events.SaveSkipped) -> None:
        self._add("resilient_saves_total", 1, "skipped")

    @_count.register
    def _tiered(self, event: events.Tiered) -> None:
        self._observe("resilient_save_stall_seconds", event.stall_s, "tiers")
        self._add("resilient_tier_bytes_total", event.nbytes)

    @_count.register
    def _at_stake(self, event: events.AtStake) -> None:
        self._kept["process"] = event.process_step or 0
        self._kept["node"] = event.node_step or 0

    @_count.register
    def _restored(self, event: events.Restored) -> None:
        self._set("resilient_restore_seconds", event.duration_s)

    @_count.register
    def _restored_from(self, event: events.RestoredFromTiers) -> None:
        for source, nbytes in event.sources:
            self._set("resilient_restore_bytes", nbytes, source)

    @_count.register
    def _explained(self, event: events.FailureExplained) -> None:
        self._set("resilient_failures_total", 1, event.failure, str(event.generation))

    @_count.register
    def _demoted(self, _: events.Demoted) -> None:
        self._add("resilient_demotions_total", 1)

    @_count.register
    def _fell_back(self, _: events.FellBack) -> None:
        self._add("resilient_fallbacks_total", 1)

    @_count.register
    def _hung(self, _: events.HangFound) -> None:
        self._add("resilient_hangs_total", 1)
        self._set("resilient_hung", 1)

    @_count.register
    def _went_on(self, _: events.HangOver) -> None:
        self._set("resilient_hung", 0)

    @_count.register
    def _straggles(self, _: events.StragglerFound) -> None:
        self._add("resilient_stragglers_total", 1)

    @_count.register
    def _sick(self, event: events.NumericFault) -> None:
        self._add("resilient_numeric_faults_total", 1, event.outcome)

    @_count.register
    def _differs(self, _: events.ReplicaDiffers) -> None:
        self._add("resilient_replica_mismatches_total", 1)

    @_count.register
    def _stop_asked(self, _: events.StopAsked) -> None:
        self._set("resilient_stop_asked", 1)

    @_count.register
    def _share_looked(self, event: events.ShareLooked) -> None:
        self._set("resilient_ettr", event.delivered)
        self._set("resilient_ettr_promised", event.promised)
