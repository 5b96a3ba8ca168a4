"""Whether compressing pays: a pure decision from what was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from resilient.errors import ErrorKind, UsageError

AUTO_LEVEL: Final = 1
"""Nearly all of the gain of byte-grouped weights is found at the lowest level; the higher ones only take longer."""

GAIN: Final = 1.15
"""How many times sooner a save must be durable for "auto" to spend processor time on it."""

_MAX_LEVEL: Final = 22
_LEVEL = re.compile(r"zstd:([0-9]{1,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """What ``compress`` asks for: ``level`` is set if and only if ``mode`` is ``"zstd"``."""

    mode: Literal["auto", "off", "zstd"]
    level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What encoding a sample of the state showed.

    ``ratio``: raw bytes per stored byte, chunks that stay raw included. ``bytes_per_s``: raw bytes that one core
    encodes in a second.
    """

    ratio: float
    bytes_per_s: float


def parse_compress(compress: str) -> Compress:
    """Return what ``"auto"``, ``"off"`` or ``"zstd:N"`` stands for.

    Raises:
        UsageError: it is none of these.
    """
    if compress == "auto":
        return Compress(mode="auto")
    if compress == "off":
        return Compress(mode="off")
    found = _LEVEL.fullmatch(str(compress))
    if found is None or not 1 <= int(found[1]) <= _MAX_LEVEL:
        raise UsageError(
            f'compress={compress!r}: it must be "auto", "off" or "zstd:N" with a level N from 1 to {_MAX_LEVEL}',
            kind=ErrorKind.INVALID_ARGUMENT,
            hint='leave it out: "auto" compresses only where that makes saves durable sooner',
        )
    return Compress(mode="zstd", level=int(found[1]))


def choose_level(compress: Compress, *, store_bytes_per_s: float | None, trial: Trial | None, cores: int) -> int | None:
    """Return the level to encode the next save with; None to store the bytes as they are.

    Encoding and sending overlap, so the slower of the two takes the time. A raw byte takes 1/S seconds at a store that
    takes S bytes per second; encoded by C cores at E bytes per second each, to an R-th of its size, it takes
    max(1/(C E), 1/(R S)). "auto" encodes if that is `GAIN` times less. The decision depends on nothing else, so a store
    that becomes faster or slower changes it with the next save.

    Args:
        compress: what was asked for.
        store_bytes_per_s: the stored bytes of the last saves by the time during which some were being sent: time spent
            waiting for the encoder must not count, or a fast store would look slow because of it. None before the
            first save, which "auto" therefore leaves raw.
        trial: for this state; None if none was made.
        cores: how many may encode.
    """
    if compress.mode == "off":
        return None
    if compress.mode == "zstd":
        return compress.level
    if store_bytes_per_s is None or trial is None or cores < 1:
        return None
    raw_s = 1 / store_bytes_per_s
    encoded_s = max(1 / (cores * trial.bytes_per_s), raw_s / trial.ratio)
    return AUTO_LEVEL if raw_s >= GAIN * encoded_s else None
