"""How often a run fails and what its saves and recoveries take, from its own account, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from resilient.policy.planning import poisson
from resilient.report.model import PRODUCTIVE, GenerationTime, Incident, Ledger, Part, SaveTime

_DAY_S: Final = 86400.0
_RECOVERY: Final = (Part.IDLE, Part.REFORMATION, Part.START, Part.RESTORE)

_LAST_SAVES: Final = frozenset({"end", "stop"})
"""Reasons of saves that training waits for until they are durable, as it is over: their stall is no usual one."""

_ACCOUNTED: Final = PRODUCTIVE | {Part.LOST}
"""What only a journal tells of; without one, all of a life counts as start-up and detection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A mean in seconds of ``count`` values, the lowest and the highest of which are ``low_s`` and ``high_s``."""

    mean_s: float
    low_s: float
    high_s: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a run says about itself. None: it says nothing about that.

    ``node_days``: for how long how many nodes were at it. ``rate``: failures per 1,000 node-days, between ``rate_low``
    and ``rate_high`` with 95 % confidence; None without a failure. ``stall``: of a save, waiting at the fence included.
    ``persist``: from its start until it is committed. Last saves are in neither, as training waits for those (in
    ``persist`` if there are no others). ``recovery``: from the detection of a failure until training went on;
    ``idle``: of that, waiting to be started again. ``interval``: training between the starts of two saves.
    """

    gpus: int
    gpus_per_node: int
    failures: int
    node_days: float
    rate: float | None
    rate_low: float
    rate_high: float
    stall: Measurement | None
    persist: Measurement | None
    recovery: Measurement | None
    detection: Measurement | None
    interval: Measurement | None
    idle: Measurement | None = None


def fit(ledger: Ledger) -> Fitted | None:
    """Return what an account says for a plan; None if no generation of it tells of a step: it kept no account.

    Means, and not medians: what a plan adds up are sums. The interval of the rate is exact for a Poisson process
    (Garwood): after few failures it is wide, and says so. A failure that nothing has come after yet counts, and its
    recovery does not.
    """
    lives = [each for each in ledger.generations if each.ended_s > each.began_s]
    if not any(map(_has_trained, lives)):
        return None
    newest = lives[-1]
    node_days = sum(max(1, len(each.hosts)) * (each.ended_s - each.began_s) for each in lives) / _DAY_S
    failures = len(ledger.incidents)
    low, high = poisson.interval(failures)
    per_1000 = 1000 / node_days
    usual = [each for each in ledger.saves if each.reason not in _LAST_SAVES]
    recovered = [each for each in ledger.incidents if any(part in each.parts for part in _RECOVERY)]
    return Fitted(
        gpus=newest.world_size,
        gpus_per_node=max(1, round(newest.world_size / max(1, len(newest.hosts)))),
        failures=failures,
        node_days=node_days,
        rate=failures * per_1000 if failures else None,
        rate_low=low * per_1000,
        rate_high=high * per_1000,
        stall=_measured(each.stall_s for each in usual),
        persist=_persist(usual) or _persist(ledger.saves),
        recovery=_measured(sum(each.parts.get(part, 0.0) for part in _RECOVERY) for each in recovered),
        detection=_measured(each.parts[Part.DETECTION] for each in ledger.incidents if Part.DETECTION in each.parts),
        interval=_intervals(ledger),
        idle=_idle(recovered),
    )


def _has_trained(life: GenerationTime) -> bool:
    return any(life.parts.get(part, 0.0) > 0 for part in _ACCOUNTED)


def _persist(saves: Iterable[SaveTime]) -> Measurement | None:
    times = (each.persist_s if each.commit_s is None else each.commit_s for each in saves)
    return _measured(each for each in times if each is not None)


def _idle(recovered: Sequence[Incident]) -> Measurement | None:
    """Return how long failures waited for somebody to start the job again; None if none did."""
    if not any(Part.IDLE in each.parts for each in recovered):
        return None
    return _measured(each.parts.get(Part.IDLE, 0.0) for each in recovered)


def _intervals(ledger: Ledger) -> Measurement | None:
    """Return what lies between the starts of two saves of one life, made by the clock or by the step."""
    starts = [(each.generation, each.at_s) for each in ledger.saves if each.reason == "interval"]
    pairs = pairwise(starts)
    return _measured(later - sooner for (one, sooner), (other, later) in pairs if one == other)


def _measured(values: Iterable[float]) -> Measurement | None:
    found = sorted(values)
    if not found:
        return None
    return Measurement(mean_s=sum(found) / len(found), low_s=found[0], high_s=found[-1], count=len(found))
