"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient.errors import ErrorKind, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep the ``last`` newest checkpoints, and every checkpoint whose step is a multiple of ``every``.

    The newest one always stays.
    """

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise _refused(
                f"Keep(last={self.last!r}): at least the newest checkpoint must stay, or a failure loses the run"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise _refused(
                f"Keep(every={self.every!r}): every how many steps a checkpoint stays for ever must be 1 or more"
            )

    def kept(self, steps: Sequence[int]) -> frozenset[int]:
        """Return those of ``steps`` that stay."""
        newest = sorted(set(steps), reverse=True)
        return frozenset(newest[: self.last]) | {step for step in newest if self.every and step % self.every == 0}


def _refused(message: str) -> UsageError:
    return UsageError(message, kind=ErrorKind.INVALID_ARGUMENT)
