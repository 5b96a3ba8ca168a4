"""What ``resilient watch`` says of a run that goes on, from its account and its sign of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient.report import words
from resilient.report.model import End, Incident, Ledger, SaveTime
from resilient.report.units import count, duration, moment, number, one_line, percent, when


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A run at one moment.

    ``alive``: whether its launch shows signs of life; None while that is not known yet. ``steps_per_s``: as just seen,
    or over the newest generation. ``total``: the step at which it will be done, if somebody has said so. ``trouble``:
    why what is shown is old, empty if it is not; then it was read ``age_s`` ago.
    """

    ledger: Ledger
    now_s: float
    alive: bool | None
    steps_per_s: float | None
    total: int | None
    trouble: str = ""
    age_s: float = 0.0

    @property
    def saved_age_s(self) -> float | None:
        """How old the newest saved state is: it is that of its boundary, however long the save took."""
        step = words.saved_step(self.ledger)
        begun = [one.at_s for one in self.ledger.saves if one.step == step and one.error is None]
        return max(0.0, self.now_s - begun[-1]) if begun else None

    @property
    def over(self) -> bool:
        """Whether it was ended as planned, or as asked: then nothing of it need be alive."""
        return bool(self.ledger.generations) and self.ledger.generations[-1].end in (End.DONE, End.STOPPED)

    @property
    def lost(self) -> bool:
        """Whether it shows no sign of life although it should."""
        return self.alive is False and not self.over

    @property
    def in_flight(self) -> SaveTime | None:
        """The save that is on its way, if any: the newest one of the newest generation."""
        last = self.ledger.saves[-1] if self.ledger.saves else None
        newest = self.ledger.generations[-1] if self.ledger.generations else None
        if last is None or newest is None or last.generation != newest.generation or newest.end is not End.RUNNING:
            return None
        return last if last.commit_s is None and last.error is None else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present speed; None if that cannot be told."""
        if self.total is None or not self.steps_per_s:
            return None
        return max(0, self.total - self.ledger.step) / self.steps_per_s


def facts(live: Live) -> list[tuple[str, str]]:
    """Return what there is to say, as (what, how it is)."""
    ledger = live.ledger
    found = [("state", f"{words.state(ledger)} {_alive(live)}".rstrip()), ("step", _step(live))]
    if ledger.generations:
        newest = ledger.generations[-1]
        hosts = ", ".join(one_line(host, most=40) for host in newest.hosts[:_MOST_HOSTS])
        more = f" and {len(newest.hosts) - _MOST_HOSTS} more" if len(newest.hosts) > _MOST_HOSTS else ""
        since = duration(max(0.0, live.now_s - newest.began_s))
        ranks = count(newest.world_size, "rank")
        found.append(
            ("generation", f"{newest.generation}, {ranks} on {hosts or 'hosts not known'}{more}, began {since} ago")
        )
    found.append(("saved", _saved(live)))
    found.append(("productive", _productive(ledger)))
    found.append(("last failure", _incident(ledger.incidents[-1] if ledger.incidents else None)))
    stakes = "; ".join(f"{one_line(one.what)}: {words.stake(one)}" for one in ledger.stakes)
    found.append(("at stake", stakes or words.no_stake(ledger)))
    if live.total is not None:
        found.append(("done", _done(live)))
    if live.trouble:
        found.append(
            ("trouble", f"{one_line(live.trouble)} (what is shown was read {duration(live.age_s)} ago; trying again)")
        )
    return found


_MOST_HOSTS = 4


def line(live: Live) -> str:
    """Return all of it in one line, for a log."""
    ledger = live.ledger
    told = [moment(live.now_s), _step(live)]
    if ledger.generations:
        newest = ledger.generations[-1]
        told.append(f"generation {newest.generation}, {count(newest.world_size, 'rank')}")
    told += [_saved(live), f"ETTR {ledger.ettr:.3f}", _alive(live) or words.state(ledger)]
    if ledger.incidents:
        told.append(
            f"{count(len(ledger.incidents), 'failure')}, the last: {one_line(ledger.incidents[-1].failure, most=40)}"
        )
    if live.total is not None:
        told.append(_done(live))
    if live.trouble:
        told.append(f"trouble: {one_line(live.trouble)}")
    return " | ".join(told)


def as_json(live: Live) -> dict[str, Any]:
    """Return what ``resilient watch --json`` prints, a document for each refresh; names are append-only."""
    ledger, flying = live.ledger, live.in_flight
    newest = ledger.generations[-1] if ledger.generations else None
    last = ledger.incidents[-1] if ledger.incidents else None
    return {
        "run": ledger.url,
        "now_s": live.now_s,
        "alive": live.alive,
        "step": ledger.step,
        "steps_per_s": live.steps_per_s,
        "generation": None if newest is None else newest.generation,
        "world_size": None if newest is None else newest.world_size,
        "hosts": [] if newest is None else list(newest.hosts),
        "saved_step": words.saved_step(ledger),
        "saved_age_s": live.saved_age_s,
        "save_in_flight": None if flying is None else flying.step,
        "ettr": ledger.ettr,
        "incidents": len(ledger.incidents),
        "last_failure": None if last is None else last.failure,
        "stakes": [{"what": one.what, "step": one.step, "lost_s": one.lost_s} for one in ledger.stakes],
        "left_s": live.left_s,
        "trouble": live.trouble or None,
    }


def _alive(live: Live) -> str:
    if live.over and not live.alive:
        return ""  # that of a run that has ended as it should is none that anybody misses
    if live.alive is None:
        return "Whether it lives is not known yet."
    return "It gives signs of life." if live.alive else "It gives no sign of life."


def _step(live: Live) -> str:
    step = f"step {number(live.ledger.step)}"
    step += "" if live.total is None else f" of {number(live.total)}"
    if not live.steps_per_s:
        return step
    speed = live.steps_per_s
    return f"{step}, {speed:.2f} steps/s" if speed >= 1 else f"{step}, {duration(1 / speed)} a step"


def _saved(live: Live) -> str:
    step, age_s, flying = words.saved_step(live.ledger), live.saved_age_s, live.in_flight
    now = "nothing saved yet" if step is None else f"saved step {number(step)}"
    now += "" if age_s is None else f", {duration(age_s)} ago"
    if flying is None:
        return now
    return f"{now}; step {number(flying.step)} on its way for {duration(max(0.0, live.now_s - flying.at_s))}"


def _productive(ledger: Ledger) -> str:
    if ledger.wall_s <= 0:
        return "there is no time to account for yet"
    hour = f", {percent(ledger.ettr_hours[-1][1])} in the last hour" if ledger.ettr_hours else ""
    promised = words.promise(ledger)
    return f"{percent(ledger.ettr)} since the beginning{hour}{f'; {promised}' if promised else ''}"


def _incident(last: Incident | None) -> str:
    if last is None:
        return "none"
    return f"{words.failure(last)}, {words.where(last)}, {moment(last.at_s)}, cost {duration(last.cost_s)}"


def _done(live: Live) -> str:
    if live.left_s is None:
        return "when it will be done cannot be told yet"
    at = when(live.now_s + live.left_s)
    return f"in {duration(live.left_s)}, at {at:%Y-%m-%d %H:%M} UTC, if nothing fails"
