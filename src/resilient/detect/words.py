"""What a watcher has to do, and what it says: typed, never executable."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

PAGE = "page-"
STACKS = "stacks-"
JOURNAL = "journal-"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a watcher watches, and how; ``folder`` is that of its generation on this node.

    ``url`` and ``options``: of the store that keeps what is found; None if no other process can open it. ``learned``:
    a file with what this rank's lives have seen. ``restart``: end the rank if it hangs.
    """

    folder: str
    learned: str
    rank: int
    world_size: int
    generation: int
    nonce: str
    interval_s: float
    floor_s: float
    unlearned_s: float
    restart: bool = False
    url: str | None = None
    options: dict[str, Any] = {}


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The watcher watches."""

    pid: int


class Symptom(msgspec.Struct, tag="symptom", frozen=True, kw_only=True):
    """The interpreter gives no sign: ``stopped`` by a signal, or ``silent``; or it does again: ``heard``."""

    kind: str
    section: str
    step: int
    silence_s: float


class Hung(msgspec.Struct, tag="hung", frozen=True, kw_only=True):
    """The rank has hung for too long. ``cause``: the rank that all others wait for, as far as it can be told.

    ``waits``: that is another one of this node, and is within the time that its own section may take.
    """

    section: str
    step: int
    age_s: float
    timeout_s: float
    cause: int | None
    cause_section: str
    why: str
    covered: bool = False  # another rank's watcher has told it already
    kept: str = ""  # why it is not in the store, if it is not
    waits: bool = False


class WentOn(msgspec.Struct, tag="went-on", frozen=True, kw_only=True):
    """It was none: the section has ended after all."""

    section: str
    step: int


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True):
    """The watcher ends the rank, which hangs."""

    section: str
    step: int


class Gone(msgspec.Struct, tag="gone", frozen=True, kw_only=True):
    """The process is gone, without having said so."""

    section: str
    step: int
    age_s: float


Word: TypeAlias = Ready | Symptom | Hung | WentOn | Ended | Gone


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a journal: ``at_s`` on the monotonic clock of the machine."""

    at_s: float
    rank: int
    pid: int
    word: Word


def encode_line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def decode_lines(data: bytes) -> list[Entry]:
    """Return the entries of whole lines; what is torn by the end is left out."""
    lines = data.split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Entry) for line in lines if line]
