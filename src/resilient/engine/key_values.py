"""The key-value store of a process group, with a deadline for each answer and with our errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch.distributed as dist

from resilient.errors import ErrorKind, PeerError

T = TypeVar("T")

_TIMEOUT_S: Final = 20.0


class TorchValues:
    """A torch store whose server may be stopped, or cut off, without anybody being held for ever.

    torch 2.13 has no deadline for the answer to a request (its time-out is for keys that are not there yet): where the
    host of the server is silently gone, or the process there is stopped, a look-up never returns. So requests are made
    on a thread of their own, and whoever waits for one gives up in time. While one hangs, others fail at once.
    """

    def __init__(self, store: dist.Store, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._overdue: Future[Any] | None = None
        # A daemon: one that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="resilient-key-values", daemon=True)
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        """Store a value; see `resilient.engine.meeting.KeyValues`."""
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # takes bytes; the stub says str

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return self._call(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Say whether all of these are there."""
        return self._call(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if ``expected`` is there ("": nothing); return what is there then."""
        return self._call(lambda: self._store.compare_set(key, expected, desired))

    def delete(self, key: str) -> None:
        """Remove a value; one that is not there is no error."""
        self._call(lambda: self._store.delete_key(key))

    def keys(self) -> list[str]:
        """Return the names of all values."""
        return self._call(self._store.list_keys)

    def _call(self, call: Callable[[], T]) -> T:
        if self._overdue is not None and not self._overdue.done():
            raise _silent(self._timeout_s)
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            self._overdue = answer
            raise _silent(self._timeout_s) from None
        except (RuntimeError, ValueError) as error:
            raise PeerError(
                f"the key-value store of the process group does not answer: {error}", kind=ErrorKind.PEER_FAILED
            ) from error

    def _work(self) -> None:
        while True:
            answer, call = self._calls.get()
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 -- boundary: thread main, raised where the answer is awaited
                answer.set_exception(error)
            del answer, call  # it would keep them until the next one comes


def _silent(timeout_s: float) -> PeerError:
    return PeerError(
        f"the key-value store of the process group has not answered within {timeout_s:g} s",
        kind=ErrorKind.PEER_TIMEOUT,
        hint="its server is in the process with rank 0, or in that node's agent: is that host alive, and reachable?",
    )
