"""``resilient watch RUN``: a run that goes on, seen from anywhere."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import click

from resilient.catalog.beat import Sign, read_sign
from resilient.catalog.generations import newest_claim
from resilient.catalog.launch import INTERVAL_S
from resilient.catalog.process import lives
from resilient.cli.render import json_option, say
from resilient.cli.stop import whole_run
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.config import parse_duration
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.format import layout
from resilient.report import words
from resilient.report.account import read_ledger
from resilient.report.live import Live, facts, line
from resilient.report.live import as_json as live_as_json
from resilient.report.model import Ledger
from resilient.store.base import Store
from resilient.store.retrying import Retrying

if TYPE_CHECKING:
    from rich.console import RenderableType

_PATIENCE: Final = 3.0
"""After how many silent intervals a launch is held for dead."""

_SHARE: Final = 10.0
"""Of the time, a tenth at most goes into reading the account: that of a long run takes its time."""

_ANSWER_S: Final = 5.0
"""For how long a call of the store is repeated within one look, at least."""

_RECENT_S: Final = 60.0
"""Over how long the speed is taken."""


@click.command(epilog="Example: resilient watch s3://bucket/runs/gpt --total 100000")
@click.argument("run")
@click.option("--every", default="2s", show_default=True, help="How often to look.")
@click.option("--total", type=click.IntRange(min=1), help="The last step: says when it will be reached.")
@click.option("--once", is_flag=True, help="Look once and end.")
@json_option
def watch(run: str, *, every: str, total: int | None, once: bool, as_json: bool) -> None:
    """Show RUN while it goes on: step, speed, what is saved, the share of productive time, the last failure.

    All of it comes from the store, so it works from any machine that can read RUN, and asks nothing of the training.
    On a terminal the view stays in place; else there is a line for each look, and with --json a document in one line.
    While the store does not answer, the last view stays and says so. Ctrl-C ends it (exit code 130).
    """
    every_s = _seconds(every)
    place = whole_run(run, "watch")
    watcher = Watcher(place.store, SYSTEM_CLOCK, every_s=every_s, total=total)
    looks = iter([watcher.look(patient=False)]) if once else _looks(watcher, SYSTEM_CLOCK, every_s)
    if as_json:
        _print(looks, lambda live: json.dumps(live_as_json(live), ensure_ascii=False))
    elif once:
        _print(looks, lambda live: "\n".join(f"{what:<12}  {how}" for what, how in facts(live)))
    elif sys.stdout.isatty():
        _stay(looks)
    else:
        _print(looks, line)


def _print(looks: Iterator[Live], words_of: Callable[[Live], str]) -> None:
    for live in looks:
        say(words_of(live))
        sys.stdout.flush()


def _looks(watcher: Watcher, clock: Clock, every_s: float) -> Iterator[Live]:
    while True:
        yield watcher.look()
        clock.sleep(every_s)


def _stay(looks: Iterator[Live]) -> None:
    # Imported when wanted, as for tables.
    from rich.live import Live as Display  # noqa: PLC0415

    with Display(auto_refresh=False, transient=False) as display:
        for live in looks:
            display.update(_view(live), refresh=True)


def _view(live: Live) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 -- as above
    from rich.text import Text  # noqa: PLC0415 -- as above

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, how in facts(live):
        bad = what == "trouble" or (what == "state" and live.lost)
        table.add_row(Text(what), Text(how, style="bold red" if bad else "bold" if what == "step" else ""))
    return table


class _Pulse:
    """Whether the launch of a run lives: on this machine its process is looked up, else its sign has to move.

    Never waits: what one look cannot tell, the next ones do. Clocks of different machines are never compared.
    """

    def __init__(self) -> None:
        self._sign: Sign | None = None
        self._moved_at: float | None = None
        """When the sign was first seen as it is now; None before anything was seen."""
        self._alive: bool | None = None

    def feel(self, store: Store, now: float) -> bool | None:
        """Return whether it lives; None if that is not known yet, or there is no sign to go by."""
        claim = newest_claim(store)
        if claim is None or not claim.heartbeat:
            return None
        sign = read_sign(store, layout.heartbeat(claim.launch))
        if sign is not None and sign.ended:
            return False
        who = claim if sign is None else sign
        here = lives(who.host, who.pid, who.process_started)
        return self._follow(sign, now) if here is None else here

    def _follow(self, sign: Sign | None, now: float) -> bool | None:
        if self._moved_at is None or sign != self._sign:
            self._alive = None if self._moved_at is None else True
            self._sign, self._moved_at = sign, now
        elif now - self._moved_at > _PATIENCE * (INTERVAL_S if sign is None else sign.interval_s):
            self._alive = False
        return self._alive


class Watcher:
    """Looks at a run again and again; knows what has changed in between."""

    def __init__(self, store: Store, clock: Clock, *, every_s: float, total: int | None = None) -> None:
        # Retries would keep the view from saying that the store is away: the next look is the next try.
        self._store = store.within(max(_ANSWER_S, every_s)) if isinstance(store, Retrying) else store
        self._clock = clock
        self._total = total
        self._ledger: Ledger | None = None
        self._read_at = -float("inf")
        self._due_at = -float("inf")
        self._pulse = _Pulse()
        self._alive: bool | None = None
        self._steps: deque[tuple[float, int]] = deque()

    def look(self, *, patient: bool = True) -> Live:
        """Return the run as it is now.

        Raises:
            StoreError: the store does not answer, and nothing has been read yet or ``patient`` is False.
        """
        trouble = ""
        try:
            self._look()
        except StoreError as error:
            if self._ledger is None or not patient:
                raise
            trouble = str(error)
        assert self._ledger is not None  # it was read, or was before
        return Live(
            ledger=self._ledger,
            now_s=self._clock.now().timestamp(),
            alive=self._alive,
            steps_per_s=self._speed(),
            total=self._total,
            trouble=trouble,
            age_s=self._clock.monotonic() - self._read_at,
        )

    def _look(self) -> None:
        began = self._clock.monotonic()
        self._alive = self._pulse.feel(self._store, began)
        if began < self._due_at:
            return
        self._ledger = read_ledger(self._store, clock=self._clock)
        self._read_at = self._clock.monotonic()
        self._due_at = self._read_at + (_SHARE - 1) * (self._read_at - began)
        self._remember(self._read_at, self._ledger.step)

    def _remember(self, now: float, step: int) -> None:
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()  # it went back: a new generation
        self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - _RECENT_S:
            self._steps.popleft()

    def _speed(self) -> float | None:
        """Return steps a second over the last minute; before that is known, over the newest generation."""
        (first_at, first), (last_at, last) = self._steps[0], self._steps[-1]
        if last_at - first_at >= _RECENT_S / 2:
            return (last - first) / (last_at - first_at)
        return words.speed(self._ledger) if self._ledger is not None else None


def _seconds(every: str) -> float:
    try:
        return parse_duration(every)
    except ValueError as error:
        raise UsageError(f"--every {every!r} {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
