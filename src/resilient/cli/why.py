"""``resilient why RUN``: what began a failure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import click

from resilient.catalog.beat import read_sign
from resilient.catalog.evidence import Explained, explain_generation, explain_silence, load_rules
from resilient.catalog.generations import newest_number, read_claim
from resilient.catalog.launch import claimant_lives
from resilient.cli.place import Place
from resilient.cli.render import json_option, say, say_json
from resilient.cli.stop import whole_run
from resilient.clock import SYSTEM_CLOCK
from resilient.config import read_settings
from resilient.errors import ErrorKind, NotFoundError
from resilient.format import layout
from resilient.format.evidence import Evidence
from resilient.policy.failures.actions import Budgets
from resilient.policy.failures.classes import ABOUT, Action, FailureClass
from resilient.policy.failures.verdict import Verdict

_AS_PLANNED: Final = frozenset({"end", "stop"})
"""Why the last step of a generation was saved that has ended well."""

_SHOWN: Final = 200  # characters of a line; --json has all of them

_IN_WORDS: Final = {
    Action.RETRY: "start it again, as it is",
    Action.RESTART: "start it again on the same nodes",
    Action.EXCLUDE_NODE: "start it again without the node",
    Action.FALL_BACK: "start it again from an older checkpoint (resilient mark failed RUN@STEP)",
    Action.STOP: "do not start it again before it is mended",
}


@click.command(epilog="Example: resilient why s3://bucket/runs/gpt --generation 7")
@click.argument("run")
@click.option(
    "--generation", type=click.IntRange(min=1), help="Which life of the run; by default, the last that failed."
)
@click.option("--rules", type=click.Path(), help="TOML with your own rules, which come first (RESILIENT_RULES).")
@json_option
def why(run: str, *, generation: int | None, rules: str | None, as_json: bool) -> None:
    """Say what began a failure of RUN: its class, the rank and node, the lines that prove it, and what to do.

    Each rank of a run writes down how it failed, and what it saw of the end of the others on its machine. The answer
    takes all of that together: a rank that only says that its connection broke is never the cause, one that was killed
    and could say nothing may be. It comes from the store alone, on any machine, also while the run goes on.

    \b
    The answer is as good as its confidence:
      certain    the lines leave no doubt
      likely     it was the first, and nothing else fits
      possible   nothing contradicts it
    The class "unknown" says that no rule knows the lines; the rank can be right all the same.
    """  # noqa: D301 -- \\b is click's mark for lines that stay as they are
    place = whole_run(run, "why")
    settings = read_settings()
    table = load_rules(rules or settings.rules)
    budgets = Budgets(attempts=settings.max_failed_attempts)
    newest = newest_number(place.store)
    for number in range(newest, 0, -1) if generation is None else (generation,):
        explained = explain_generation(place.store, number, place.line, rules=table, budgets=budgets)
        # One that was stopped leaves no word either: older ones are held for failed only if somebody asks.
        asked = number == newest if generation is None else number <= newest
        if explained is None and asked and not _is_accounted_for(place, number):
            explained = explain_silence(place.store, number)
        if explained is not None:
            _show(place, explained, as_json=as_json)
            return
    raise _no_failure(place, generation)


def _is_accounted_for(place: Place, generation: int) -> bool:
    """Say whether a generation without a word of a failure goes on, or has ended as planned, or never began."""
    claim = read_claim(place.store, generation)
    if claim is None or not claim.heartbeat:
        return True  # a bare save
    last = next((commit for commit in place.line.commits if commit.generation == generation), None)
    if last is not None and last.reason in _AS_PLANNED:
        return True
    if generation < newest_number(place.store):
        return False
    sign = read_sign(place.store, layout.heartbeat(claim.launch))
    ended = sign is not None and sign.ended  # by itself, and a failure would have been written down
    return ended or claimant_lives(place.store, claim, SYSTEM_CLOCK)


def _no_failure(place: Place, generation: int | None) -> NotFoundError:
    which = "no generation has left word" if generation is None else f"generation {generation} has left no word"
    return NotFoundError(
        f"{place.url}: {which} of a failure",
        kind=ErrorKind.NO_SUCH_OBJECT,
        hint="it may go on, or have ended as planned; `resilient ls` shows what it has saved",
    )


def _show(place: Place, explained: Explained, *, as_json: bool) -> None:
    verdict, decision = explained.verdict, explained.decision
    if as_json:
        told = asdict(verdict) | {"action": decision.action, "because": decision.why, "exclude": decision.node}
        records = [_brief(record) for record in explained.records]
        about = {"run": place.url, "generation": explained.generation, "world_size": explained.world_size}
        say_json({**about, **told, "records": records})
        return
    known = ABOUT[verdict.failure]
    count = explained.world_size
    size = "" if count is None else ", 1 rank" if count == 1 else f", {count} ranks"
    say(f"generation {explained.generation} of {place.url}{size}")
    say(f"  failed by  {verdict.failure}: {known.title} ({_confidence(verdict)})")
    say(f"  where      {_where(explained)}")
    say(f"  because    {verdict.why}")
    _say_lines("proof", verdict.proof)
    _say_lines("then", verdict.follows)
    node = "" if decision.node is None else f" {decision.node}"
    say(f"  do         {_IN_WORDS[decision.action]}{node} ({decision.why})")
    say(f"  mend       {known.remedy}")


def _where(explained: Explained) -> str:
    verdict = explained.verdict
    words = ["no single rank" if verdict.rank is None else f"rank {verdict.rank}"]
    words += [f"on {verdict.node}"] if verdict.node is not None else []
    words += [f"after step {verdict.step}"] if verdict.step is not None else []
    sections = {record.section for record in explained.records if record.rank == verdict.rank and record.section}
    words += [f"in section {name!r}" for name in sorted(sections)]
    return ", ".join(words)


def _confidence(verdict: Verdict) -> str:
    unknown = verdict.failure is FailureClass.UNKNOWN and verdict.rank is not None
    return f"the rank is {verdict.confidence}" if unknown else verdict.confidence


def _say_lines(heading: str, lines: tuple[str, ...]) -> None:
    for number, line in enumerate(lines):
        shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
        say(f"  {heading if number == 0 else '':<9}  {shown}")


def _brief(record: Evidence) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "host": record.host,
        "pid": record.pid,
        "seen_by": record.seen_by,
        "created": record.created,
        "step": record.step,
        "section": record.section,
        "lines": list(record.lines),
        "frames": [f"{each.file}:{each.line} {each.function} ({each.owner})" for each in record.frames],
        "stderr": list(record.stderr),
        "oom_kills": record.oom_kills,
    }
