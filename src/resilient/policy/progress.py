"""Whether a process makes progress: what silence and a long section mean, and which rank of a hung job is the cause.

Three cases are told apart, because they call for different things. A helper thread of the process beats at a fixed
rate. No beat while the process exists is a *symptom*: a healthy step may hold the interpreter's lock as well. A section
(a step, a save, ...) that lasts longer than it ever should is a *hang*, whether the thread beats or not. Phi-accrual
detectors (Hayashibara et al., "The phi accrual failure detector", SRDS 2004) suit the beats of a fixed rate, and not
the sections: one step in a hundred that is twenty times slower, as a save makes it, is an alarm for them each time.
The learned timeout, five times the largest duration seen, smoothed over the lives of a job by 0.5, and the first steps
left out, is that of NVIDIA's Resiliency Extension (NVRx).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

FACTOR: Final = 5.0
"""How many times the largest duration that was seen is still no hang."""

ENOUGH: Final = 500
"""After so many observations the largest is believed. The next one exceeds the largest of n with a chance of 1 in
n + 1, so a section that was seen rarely gets so much more time as it was seen less often."""

SMOOTHING: Final = 0.5
SILENT: Final = 2.0
"""Intervals without a beat that make a symptom; with four looks in an interval, it is seen before three are over."""

EXCHANGE: Final = "exchange"

_ALIKE: Final = {"section": "section", "signature": "stack"}

RUNNING: Final = 0
MAY_WAIT: Final = 1
WAITS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a section: how often it has ended, and how long it took at most."""

    count: int = 0
    longest_s: float = 0.0


NEVER: Final = Seen()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a section may last: ``unlearned_s`` while nothing is known of it, and never less than ``floor_s``."""

    floor_s: float = 60.0
    unlearned_s: float = 1800.0

    def timeout_s(self, seen: Seen) -> float:
        """Return after how many seconds a section of which that was seen is a hang."""
        if seen.count == 0:
            return max(self.unlearned_s, self.floor_s)
        learned_s = FACTOR * seen.longest_s
        cautious_s = learned_s * max(1.0, ENOUGH / seen.count)
        return max(self.floor_s, learned_s, min(self.unlearned_s, cautious_s))


def merged(before: Seen, now: Seen) -> Seen:
    """Return what this life and those before it have seen of a section.

    What has become quicker is believed by halves, life by life; what has become slower at once, or the first life on a
    slower node would be one long false alarm.
    """
    if not now.count or not before.count:
        return before if not now.count else now
    smoothed_s = SMOOTHING * before.longest_s + (1 - SMOOTHING) * now.longest_s
    return Seen(count=before.count + now.count, longest_s=max(now.longest_s, smoothed_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What a look at a process shows, times in seconds of one monotonic clock."""

    beat_s: float  # of its newest beat
    section: str
    step: int  # complete steps
    started_s: float  # when the section began
    mark: int = 0  # moves whenever a section begins or ends
    seen: Seen = NEVER  # of that section, in this life


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A symptom: the interpreter has given no sign for so long; nothing is to be done about it."""

    section: str
    step: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """It gives signs again."""

    section: str
    step: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A hang: the section has lasted ``age_s``, and ``timeout_s`` is what it may."""

    section: str
    step: int
    age_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WentOn:
    """What was taken for a hang was none: the section has ended after all."""

    section: str
    step: int


Finding: TypeAlias = Silent | Heard | Overdue | WentOn


class Progress:
    """The detector of one process in one generation; ``before`` is what earlier lives have seen, by section.

    Whoever looks may have been held up itself (its machine suspended, its group frozen by a scheduler): what nobody
    looked at for longer than `SILENT` intervals is held against nobody.
    """

    def __init__(self, interval_s: float, patience: Patience, before: Mapping[str, Seen] | None = None) -> None:
        self._interval_s = interval_s
        self._patience = patience
        self._before = dict(before or {})
        self._looked_s: float | None = None
        self._awake_s = float("-inf")
        self._excused_s = 0.0
        self._where: tuple[str, int] | None = None
        self._silent_since_s: float | None = None
        self._overdue: tuple[int, str, int] | None = None  # mark, section, step

    def timeout_s(self, section: str, seen: Seen) -> float:
        """Return after how many seconds a section is a hang, by all that is known."""
        return self._patience.timeout_s(merged(self._before.get(section, NEVER), seen))

    def look(self, now_s: float, glance: Glance) -> list[Finding]:
        """Return what is new; to be called several times an interval."""
        self._excuse(now_s)
        return [*self._beats(now_s, glance), *self._section(now_s, glance)]

    def _excuse(self, now_s: float) -> None:
        if self._looked_s is not None and now_s - self._looked_s > SILENT * self._interval_s:
            self._excused_s += now_s - self._looked_s
            self._awake_s = now_s
        self._looked_s = now_s

    def _beats(self, now_s: float, glance: Glance) -> Iterable[Finding]:
        since_s = max(glance.beat_s, self._awake_s)
        if self._silent_since_s is None and now_s - since_s > SILENT * self._interval_s:
            self._silent_since_s = glance.beat_s
            yield Silent(section=glance.section, step=glance.step, silence_s=now_s - glance.beat_s)
        elif self._silent_since_s is not None and glance.beat_s > self._silent_since_s:
            silence_s, self._silent_since_s = glance.beat_s - self._silent_since_s, None
            yield Heard(section=glance.section, step=glance.step, silence_s=silence_s)

    def _section(self, now_s: float, glance: Glance) -> Iterable[Finding]:
        where = (glance.section, glance.step)
        if where != self._where:
            self._where, self._excused_s = where, 0.0
        if self._overdue is not None and glance.mark != self._overdue[0]:
            _, section, step = self._overdue
            self._overdue = None
            yield WentOn(section=section, step=step)
        age_s = now_s - glance.started_s - self._excused_s
        timeout_s = self.timeout_s(glance.section, glance.seen)
        if self._overdue is None and age_s > timeout_s:
            self._overdue = (glance.mark, *where)
            yield Overdue(section=glance.section, step=glance.step, age_s=age_s, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank of a hung job stands.

    ``waits``: `WAITS` if its stack is in a collective or waits for another rank's word, `MAY_WAIT` if it is in native
    code that may contain one (a backward pass), `RUNNING` else. ``signature``: what the stacks of ranks that do the
    same have in common. ``stopped``: by a signal or a debugger.
    """

    rank: int
    section: str
    step: int
    age_s: float
    waits: int = RUNNING
    signature: str = ""
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Which rank all others wait for, and in what it hangs; None where that cannot be told."""

    rank: int | None
    section: str
    why: str


def first_cause(standings: Sequence[Standing], world_size: int) -> HangVerdict:
    """Return who holds up a hung job: all ranks hang when one does, and it is the one that waits for nobody.

    In this order: a rank that is stopped; ranks of which nothing is known, if all others wait in an exchange; the rank
    that waits least for others; among equals the one that is behind, then the one that does what no other does.
    """
    known = {each.rank for each in standings}
    missing = [rank for rank in range(world_size) if rank not in known]
    stopped = [each for each in standings if each.stopped]
    if stopped:
        return _named(min(stopped, key=lambda each: each.step), "the process is stopped")
    if not standings or (missing and all(each.waits == WAITS for each in standings)):
        who = ", ".join(map(str, missing[:8]))
        lone = missing[0] if len(missing) == 1 else None
        return HangVerdict(rank=lone, section="", why=f"all others wait; nothing is known of rank {who}")
    least = min(each.waits for each in standings)
    suspects = [each for each in standings if each.waits == least]
    if len(suspects) == 1 and len(standings) > 1:
        return _named(suspects[0], "all others wait for it")
    if world_size == 1:
        return _named(suspects[0], "it is the only rank")
    return _among(suspects)


def _among(suspects: Sequence[Standing]) -> HangVerdict:
    first = min(each.step for each in suspects)
    behind = [each for each in suspects if each.step == first]
    if len(behind) < len(suspects):
        suspects = behind
        if len(behind) == 1:
            return _named(behind[0], "it is behind the others")
    for what in ("section", "signature"):
        counts = Counter(getattr(each, what) for each in suspects)
        rare = [each for each in suspects if counts[getattr(each, what)] == 1]
        if len(rare) == 1 and len(suspects) > 2:
            return _named(rare[0], f"its {_ALIKE[what]} is unlike that of all others")
    sections = {each.section for each in suspects}
    who = ", ".join(str(each.rank) for each in suspects[:8])
    return HangVerdict(rank=None, section=sections.pop() if len(sections) == 1 else "", why=f"ranks {who} look alike")


def _named(standing: Standing, why: str) -> HangVerdict:
    return HangVerdict(rank=standing.rank, section=standing.section, why=why)
