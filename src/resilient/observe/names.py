"""The metrics of a run by name: documented, append only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What a metric is to Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels`` are those besides `COMMON`; ``about`` is what a scrape says of it. Units are in the name."""

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


COMMON: Final = ("run", "rank")
"""Labels of every metric: the URL of the run, and the global rank."""

BUCKETS_S: Final = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the buckets of every histogram, seconds: from a stall that nobody feels to a store that is stuck."""

METRICS: Final = (
    Metric("resilient_step", Kind.GAUGE, "Steps that are complete, in the whole life of the run."),
    Metric("resilient_steps_total", Kind.COUNTER, "Steps that this life has taken."),
    Metric("resilient_step_seconds", Kind.GAUGE, "Mean duration of the latest steps, saves and waits included."),
    Metric(
        "resilient_step_part_seconds",
        Kind.GAUGE,
        "What a step is spent on: the median of those looked at last, by part of the step picture.",
        ("part",),
    ),
    Metric(
        "resilient_time_seconds_total",
        Kind.COUNTER,
        "Time within the loop, by what it was spent on; the exchange wait is known once there is a step picture.",
        ("part",),
    ),
    Metric("resilient_generation", Kind.GAUGE, "The number of this life of the run: 1 at first."),
    Metric("resilient_world_size", Kind.GAUGE, "How many ranks there are in this life."),
    Metric("resilient_saves_total", Kind.COUNTER, "Saves of this life, by how they ended.", ("outcome",)),
    Metric("resilient_saved_step", Kind.GAUGE, "The newest step that this life has committed, or continues from."),
    Metric("resilient_save_stall_seconds", Kind.HISTOGRAM, "How long training was held up by a save.", ("to",)),
    Metric("resilient_save_fence_seconds_total", Kind.COUNTER, "Further waits for copies before a state changed."),
    Metric("resilient_save_persist_seconds", Kind.HISTOGRAM, "From the beginning of a save until it was durable."),
    Metric("resilient_save_commit_seconds", Kind.HISTOGRAM, "From the beginning of a save until its commit."),
    Metric("resilient_save_bytes_total", Kind.COUNTER, "Bytes that were written to the store."),
    Metric("resilient_tier_bytes_total", Kind.COUNTER, "Bytes of states that went to the tiers of the node."),
    Metric("resilient_restore_seconds", Kind.GAUGE, "How long the restore of this life has taken."),
    Metric("resilient_restore_bytes", Kind.GAUGE, "Bytes that all ranks read for it, by where from.", ("source",)),
    Metric("resilient_at_stake_steps", Kind.GAUGE, "Steps that would be lost now, by with what.", ("what",)),
    Metric(
        "resilient_failures_total",
        Kind.COUNTER,
        "1 for a failed life that this one has explained: count distinct ones, see docs/observability.md.",
        ("class", "generation"),
    ),
    Metric("resilient_demotions_total", Kind.COUNTER, "Checkpoints that the run has marked failed."),
    Metric("resilient_fallbacks_total", Kind.COUNTER, "Checkpoints that were passed over as not usable."),
    Metric("resilient_hangs_total", Kind.COUNTER, "Hangs of this rank that were reported."),
    Metric("resilient_hung", Kind.GAUGE, "1 from the report of a hang until it is over, else 0."),
    Metric("resilient_stragglers_total", Kind.COUNTER, "Reports that some rank holds up the others."),
    Metric("resilient_numeric_faults_total", Kind.COUNTER, "Steps with sick numbers, by what followed.", ("outcome",)),
    Metric("resilient_replica_mismatches_total", Kind.COUNTER, "Comparisons that found replicas that differ."),
    Metric("resilient_stop_asked", Kind.GAUGE, "1 once this rank was asked to stop or to make way, else 0."),
    Metric("resilient_ettr", Kind.GAUGE, "The share of productive time at the last look; with a promise alone."),
    Metric("resilient_ettr_promised", Kind.GAUGE, "The share that is promised."),
)  # fmt: skip
