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


def already_complete(step: int) -> UsageError:
    """Return the error of a run that has ended and is asked for pass after pass."""
    return misused(
        f"the run is complete at step {step}, so there is no further pass without total",
        "pass total=, the number of steps of the run's whole life, to train on",
    )


def no_data(passes: int, step: int, total: int | None) -> UsageError:
    """Return the error of data that is empty, pass after pass."""
    return misused(
        f"the data yielded nothing in {passes} passes, at step {step} of {total}",
        "pass something that can be iterated again and again, such as a DataLoader; a generator cannot",
    )
