"""What an exception says: its words and those of what it follows from, and whose code was on the stack."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import torch

import resilient
from resilient.format.evidence import Frame

_MOST_LINES: Final = 40
_MOST_FRAMES: Final = 48
_SECTION: Final = re.compile(r"in section '(.*)', after step \d+")
_QUEUE: Final = "/multiprocessing/"
_LOADER: Final = "/torch/utils/data/"


def words(error: BaseException) -> tuple[str, ...]:
    """Return ``TypeName: message`` of an exception, then of what it follows from, line by line."""
    lines = [line for each in chain(error) for line in _said(each)]
    return tuple(lines[:_MOST_LINES])


def frames(error: BaseException) -> tuple[Frame, ...]:
    """Return the traceback of an exception, the innermost frame last, with the owner of each."""
    return _frames(traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False))


def frames_now(thread: int) -> tuple[Frame, ...]:
    """Return where a thread of this process is, the innermost frame last."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 -- the documented way to other threads' frames
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False) if frame else ()
    return _frames(list(found)[::-1])


def section(error: BaseException) -> str:
    """Return the section of the run that an exception came out of; "" if it was none."""
    found = (_SECTION.fullmatch(note) for note in getattr(error, "__notes__", ()) if isinstance(note, str))
    return next((match[1] for match in found if match is not None), "")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from, and so on."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


@cache
def owner_of(file: str) -> str:
    """Say whose code a file is: "torch", "resilient", "library", "python", or the "user"'s."""
    if file.startswith("<frozen "):
        return "python"
    return next((owner for folder, owner in _folders() if file.startswith(folder)), "user")


@cache
def _folders() -> tuple[tuple[str, str], ...]:
    """Return the folders of installed code, the inner ones first."""
    paths = sysconfig.get_paths()
    found = [
        (str(Path(module.__file__ or "/").parent), owner)
        for module, owner in ((torch, "torch"), (resilient, "resilient"))
    ]
    found += [(paths[name], "library") for name in ("purelib", "platlib")]
    found += [(paths[name], "python") for name in ("stdlib", "platstdlib")]
    return tuple((folder.rstrip("/") + "/", owner) for folder, owner in found)


def _frames(found: Sequence[traceback.FrameSummary]) -> tuple[Frame, ...]:
    return tuple(
        Frame(owner=owner_of(each.filename), file=each.filename, line=each.lineno or 0, function=each.name)
        for each in found[-_MOST_FRAMES:]
    )


def _said(error: BaseException) -> list[str]:
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}.{kind.__qualname__}"
    )
    first, *rest = str(error).splitlines() or [""]
    where = frames(error)
    in_queue = bool(where) and _QUEUE in where[-1].file and any(_LOADER in frame.file for frame in where)
    broken = isinstance(error, ConnectionError | EOFError) and in_queue
    # A worker of a loader that dies closes its queue; that is no other rank's end, whatever the class says.
    return [f"DataLoader: {name}: {first}" if broken else f"{name}: {first}", *(line for line in rest if line.strip())]
