"""What a rank or a witness of its end leaves of a failure, and what was concluded from it: sealed JSON, for people."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from resilient.errors import CorruptError
from resilient.format.frame import seal_json, unseal_json

MOST_NBYTES: Final = 64 << 10
"""Of one record."""

IN_FULL: Final = 256
"""Ranks below this number leave a record whatever they fail by; the others only if they may be the first."""

_LINE: Final = 1000  # characters

D = TypeVar("D", "Evidence", "Explanation")


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a traceback. ``owner``: "user", "torch", "resilient", "library" or "python"."""

    owner: str
    file: str
    line: int
    function: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank of a generation failed, in its own words; or, with ``seen_by``, how its process was seen to end.

    ``monotonic_s`` is comparable where ``clock`` (the boot of a machine) is the same; ``wall_s`` (since 1970) between
    machines, after ``offset_s`` was added, if somebody has measured that. ``lines``: of the exception and of what it
    follows from, or "process ended by SIGKILL". ``frames`` of the first of them, the innermost last. ``oom_kills``: by
    how much the kernel's counters have risen since the start. ``first_rank``, ``local_world_size``: the ranks of this
    node. ``bystander``: this rank had not failed; ``frames`` are where it was when another one of its machine ended.
    """

    generation: int
    nonce: str
    rank: int
    world_size: int
    first_rank: int
    local_world_size: int
    host: str
    pid: int
    clock: str
    monotonic_s: float
    wall_s: float
    created: str
    lines: tuple[str, ...]
    frames: tuple[Frame, ...] = ()
    section: str = ""
    step: int | None = None
    stderr: tuple[str, ...] = ()
    oom_kills: int = 0
    offset_s: float | None = None
    seen_by: int | None = None
    bystander: bool = False


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the next life of the run has concluded about a generation. ``acted``: whether the run does it by itself."""

    generation: int
    failure: str
    confidence: str
    why: str
    rank: int | None
    node: str | None
    step: int | None
    proof: tuple[str, ...]
    follows: tuple[str, ...]
    action: str
    because: str
    acted: bool
    created: str


_KINDS: Final[dict[type, str]] = {Evidence: "evidence", Explanation: "explanation"}


def encode_evidence(document: Evidence) -> bytes:
    """Return a record of at most `MOST_NBYTES`: what is longer loses the middle of its lines and frames."""
    cut = msgspec.structs.replace(document, lines=_cut(document.lines), stderr=_cut(document.stderr))
    most = max(map(len, (cut.lines, cut.frames, cut.stderr)))
    while len(data := _encode(cut)) > MOST_NBYTES:
        assert most > 1, "one line of each fits"
        most //= 2
        cut = msgspec.structs.replace(
            cut,
            lines=_ends(cut.lines, most),
            frames=_ends(cut.frames, most),
            stderr=cut.stderr[-most:],
        )
    return data


def encode_explanation(document: Explanation) -> bytes:
    return _encode(document)


def decode(kind: type[D], data: bytes, where: str) -> D | None:
    """Return a document, or None if it does not parse: what is torn says nothing, and blocks nobody."""
    try:
        members = unseal_json(data, where)
        members.pop("format")
        if members.pop("kind", None) != _KINDS[kind]:
            return None
        return msgspec.convert(members, kind)
    except (CorruptError, msgspec.ValidationError):
        return None


def _encode(document: Evidence | Explanation) -> bytes:
    members: dict[str, Any] = msgspec.to_builtins(document)
    return seal_json({"kind": _KINDS[type(document)], **members})


def _cut(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line if len(line) <= _LINE else f"{line[:_LINE]}..." for line in lines)


def _ends(entries: tuple[Any, ...], most: int) -> tuple[Any, ...]:
    """Return the first and the last of them: an error says what at its beginning, and a traceback where at its end."""
    return entries if len(entries) <= most else (*entries[: most // 2], *entries[len(entries) - (most - most // 2) :])
