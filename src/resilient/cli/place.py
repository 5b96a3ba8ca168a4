"""Which run, and which step of it, an argument of the command line means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

import click

from resilient.catalog.contents import Foreign
from resilient.catalog.dcp.view import find_dcp
from resilient.catalog.line import Line, read_line
from resilient.catalog.once import exists
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError, ErrorKind, NotFoundError, ResilientError, UsageError
from resilient.format import layout
from resilient.format.documents import Commit
from resilient.store.base import Store
from resilient.store.open import open_store

_STEP = re.compile(r"(.+)@([0-9]{1,12})", re.DOTALL)
_CANDIDATES = 50
"""Among how many neighbors a run is looked for, when there is none where the argument says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run that exists, and the step that was asked for, if any."""

    url: str
    store: Store
    line: Line
    step: int | None

    def chosen(self) -> Commit:
        """Return the checkpoint that was asked for: the newest, if no step was.

        Raises:
            NotFoundError: it is not there.
            CorruptError: it is there and cannot be read.
        """
        if self.step is not None:
            return self.line.at(self.step)
        if self.line.commits:
            return self.line.commits[0]
        if self.line.ignored:
            raise CorruptError(
                f"{self.url} has no checkpoint that can be used: {'; '.join(self.line.ignored)}",
                kind=ErrorKind.NOTHING_USABLE,
                hint=f"`resilient verify {self.url}` lists what is damaged",
            )
        raise nothing_committed(self.url)


def nothing_committed(url: str) -> NotFoundError:
    return NotFoundError(
        f"{url} holds no checkpoint: nothing was committed yet", kind=ErrorKind.NO_CHECKPOINT, hint="check the place"
    )


def open_until_done(url: str) -> Store:
    """Return a store that is closed when the command ends."""
    store = open_store(url)
    click.get_current_context().call_on_close(store.close)
    return store


def parse(argument: str) -> tuple[str, int | None]:
    """Take ``RUN@STEP`` apart; what follows an ``@`` and cannot be a step belongs to RUN."""
    found = _STEP.fullmatch(argument)
    return (found[1], int(found[2])) if found else (argument, None)


def open_place(argument: str, *, even_damaged: bool = False) -> Place:
    """Return the run that ``RUN`` or ``RUN@STEP`` means; if ``even_damaged``, also without a sound ``run.json``.

    Raises:
        NotFoundError: nothing is there; the hint names runs near by.
        UsageError: something else is there; the hint names runs near by.
        CorruptError: the run's own document is damaged, or newer than this version.
    """
    url, step = parse(argument)
    store = open_until_done(url)
    try:
        open_run(store, create=False, clock=SYSTEM_CLOCK)
    except (NotFoundError, UsageError) as error:
        written_by_dcp = find_dcp(store)
        if written_by_dcp is not None:
            return Place(url=url, store=written_by_dcp, line=read_line(written_by_dcp), step=step)
        near = _runs_near(url, store)
        if not near:
            raise
        # With a slash where the name by itself would be read as RUN@STEP once more.
        hint = f"did you mean {' or '.join(name if parse(name)[1] is None else f'{name}/' for name in near)}?"
        raise type(error)(str(error), kind=error.kind, hint=hint) from error
    except CorruptError as error:
        if not even_damaged or error.kind is ErrorKind.NEWER_FORMAT:
            raise
    return Place(url=url, store=store, line=read_line(store), step=step)


def open_own(argument: str, *, even_damaged: bool = False) -> Place:
    """Return a run as `open_place` does, but only one that this package has written, and whose marks it may change."""
    place = open_place(argument, even_damaged=even_damaged)
    if isinstance(place.store, Foreign):
        raise UsageError(
            f"{place.url} was written by another library, which knows none of this", kind=ErrorKind.NOT_A_RUN
        )
    return place


def asked_step(place: Place, argument: str) -> int:
    """Return the step that was named; a command that changes something takes none by itself."""
    if place.step is None:
        raise UsageError(
            f"{argument} names no step",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"name one, as in {argument}@{place.line.commits[0].step if place.line.commits else 'STEP'}",
        )
    return place.step


def one_step(place: Place, argument: str) -> Commit:
    """Return the checkpoint that was named by its step."""
    return place.line.at(asked_step(place, argument))


def _runs_near(url: str, store: Store) -> list[str]:
    """Return runs below a place; if there are none, the one above it; else those beside it; at most three."""
    trimmed = url.rstrip("/")
    parent, slash, name = trimmed.rpartition("/")
    searches: list[Callable[[], Iterator[str]]] = [lambda: _children(trimmed, store)]
    if slash and parent and not parent.endswith(("/", ":")):
        searches.append(lambda: _itself(parent))
    if not parent.endswith(("/", ":")):
        searches.append(lambda: _siblings(parent if slash else ".", name))
    for search in searches:
        try:
            found = list(islice(search(), 3))
        except ResilientError:
            continue  # advice is not worth another error
        if found:
            return found  # of further runs none is as near
    return []


def _children(url: str, store: Store) -> Iterator[str]:
    for name in islice(store.folders(""), _CANDIDATES):
        if exists(store, f"{name}/{layout.RUN}"):
            yield f"{url}/{name}"


def _itself(url: str) -> Iterator[str]:
    if exists(open_until_done(url), layout.RUN):
        yield url


def _siblings(parent: str, name: str) -> Iterator[str]:
    store = open_until_done(parent or "/")
    names = list(islice(store.folders(""), 20 * _CANDIDATES))
    for near in get_close_matches(name, names):
        if near != name and exists(store, f"{near}/{layout.RUN}"):
            yield f"{parent}/{near}" if parent != "." else near
