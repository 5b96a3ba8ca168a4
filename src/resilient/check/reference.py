"""Whether a node is as fast as it was: a comparison with what an earlier check of the same node has printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient.check.limits import Limits
from resilient.check.result import Result, Status
from resilient.errors import ErrorKind, UsageError

_RATES: Final = frozenset({"Gop/s", "GiB/s", "MiB/s", "TFLOP/s", "Gbit/s"})


class _Recorded(msgspec.Struct):
    results: list[Result]


def read(path: Path) -> list[Result]:
    """Return the results in a file that holds what ``resilient check --json`` printed.

    Raises:
        UsageError: there is no such file, or it holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Recorded).results
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{path} is no record of a check: {error}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="make one while the node is well: resilient check --json > FILE",
        ) from error


def compared(results: Sequence[Result], recorded: Sequence[Result], limits: Limits) -> list[Result]:
    """Return ``results``, where a rate that has become much lower than the recorded one counts as slow."""
    before = {(each.name, each.subject): each.figure for each in recorded if each.unit in _RATES}
    return [_compared(each, before.get((each.name, each.subject)), limits) for each in results]


def _compared(result: Result, before: float | None, limits: Limits) -> Result:
    now = result.figure
    if result.status is not Status.OK or result.unit not in _RATES or now is None or not before:
        return result
    if now >= limits.reference_ratio * before:
        return result
    return msgspec.structs.replace(
        result,
        status=Status.SLOW,
        line=f"{now:.3g} {result.unit}, {now / before:.2f} of what this node once had ({before:.3g})",
        remedy="look for what has changed: another program, heat, a lost memory channel or link; or record it anew",
        limit=limits.reference_ratio * before,
    )
