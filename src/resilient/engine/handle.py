"""What a caller holds of a save under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from resilient.engine.callbacks import Stage
from resilient.errors import ErrorKind, StoreError


class SaveHandle:
    """A save under way: three futures, in the order in which they complete.

    ``staged``: the state is copied; training may change it. ``persisted``: this rank's bytes are durable.
    ``committed``: every rank's are, and the step counts; its result is the step. If the save fails, those that are not
    yet complete carry the error.

    Their callbacks run one after another on a thread of their own, so they may take long, and wait for other saves. The
    end of a run waits for them, for as long as it waits for its writer.
    """

    def __init__(self, step: int, *, call: Callable[[Callable[[], object]], object] = lambda now: now()) -> None:
        """``call`` is given the callbacks that are due."""
        self.step = step
        self.staged: Future[None] = Stage(call)
        self.persisted: Future[None] = Stage(call)
        self.committed: Future[int] = Stage(call)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the step is committed.

        Args:
            timeout: seconds; None waits as long as the save's own deadline allows.

        Raises:
            ResilientError: the save failed, or is not committed in time (kind ``deadline``; it may still be later).
        """
        try:
            self.committed.result(timeout)
        except FutureTimeoutError as error:
            done = "its own bytes are durable" if self.persisted.done() else "its own bytes are not yet durable"
            raise StoreError(
                f"step {self.step} is not committed after {timeout:g} s; {done}",
                kind=ErrorKind.DEADLINE,
                hint="the save goes on; wait longer, or look for the rank that is late",
                retryable=True,
            ) from error

    def fail(self, error: BaseException) -> None:
        """Complete what is not yet complete with an error."""
        for future in (self.staged, self.persisted, self.committed):
            if not future.done():
                future.set_exception(error)

    def __repr__(self) -> str:
        for name, future in (("committed", self.committed), ("persisted", self.persisted), ("staged", self.staged)):
            if future.done():
                return f"<save of step {self.step}: {'failed' if future.exception() else name}>"
        return f"<save of step {self.step}: started>"


def committed_handle(step: int) -> SaveHandle:
    """Return the handle of a save that was over before this process began."""
    handle = SaveHandle(step)
    handle.staged.set_result(None)
    handle.persisted.set_result(None)
    handle.committed.set_result(step)
    return handle
