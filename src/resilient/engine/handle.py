"""What a caller holds of a save under way."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from resilient.errors import ErrorKind, StoreError


class SaveHandle:
    """A save under way: three futures, in the order in which they complete.

    ``staged``: the state is copied; training may change it. ``persisted``: this rank's bytes are durable.
    ``committed``: every rank's are, and the step counts; its result is the step. If the save fails, those that are not
    yet complete carry the error.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged: Future[None] = Future()
        self.persisted: Future[None] = Future()
        self.committed: Future[int] = Future()
        for future in (self.staged, self.persisted, self.committed):
            future.set_running_or_notify_cancel()  # a save cannot be called back, and `cancel` says so

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
