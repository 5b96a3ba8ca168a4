"""Which step a checkpoint id of DCP means."""

from __future__ import annotations

import os

from resilient.errors import ErrorKind, UsageError

_DIGITS = 12
"""Keys have twelve digits for the step."""


def is_step(checkpoint_id: object) -> bool:
    """Say whether a checkpoint id is a step: a whole number of at least 0 and below 10**12, or its digits."""
    text = _text(checkpoint_id)
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def step_of(checkpoint_id: object) -> int:
    """Return the step that a checkpoint id is; raise `UsageError` if it is none."""
    if not is_step(checkpoint_id):
        raise UsageError(
            f"{checkpoint_id!r} is not a step: a whole number of at least 0 and below 10**12",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="the place is said to StorageWriter or StorageReader; a checkpoint_id says which step of it",
        )
    return int(_text(checkpoint_id))


def _text(checkpoint_id: object) -> str:
    if isinstance(checkpoint_id, os.PathLike):
        return os.fsdecode(checkpoint_id)
    return str(checkpoint_id) if isinstance(checkpoint_id, str | int) else ""  # numbers, and False is none
