"""What a training function is told when it uses its run in a way that would save or restore something wrong."""

from __future__ import annotations

from resilient.errors import ErrorKind, UsageError


def misused(message: str, hint: str) -> UsageError:
    return UsageError(message, kind=ErrorKind.INVALID_ARGUMENT, hint=hint)


def no_boundary(step: int, why: str, hint: str | None = None) -> UsageError:
    return UsageError(
        f"the state is not that of a step boundary (step {step} is complete): {why}",
        kind=ErrorKind.NOT_A_BOUNDARY,
        hint=hint
        or "call run.save at the start of a turn, right after the batch was drawn, and not between micro-batches",
    )
