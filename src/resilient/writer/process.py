"""A writer in a process of its own, as its trainer sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from resilient.config import environment_with
from resilient.errors import ErrorKind, PeerError
from resilient.writer.link import tell
from resilient.writer.messages import Abandon, Answer, Close, Died, Open, Order, Ready, Save, Structure
from resilient.writer.outliving import DEAF
from resilient.writer.slot import Slot
from resilient.writer.wire import ANSWERS, Wire

_SEND_TIMEOUT_S: Final = 30.0
_REAP_S: Final = 30.0
_LAST_WORDS: Final = 2000  # bytes


class ProcessWriter:
    """Starts a writer process, and talks with it. A `WriterLink`.

    ``heard`` gets the answers, one at a time, on a thread of this object; `Died` exactly once if the writer ends
    without having been asked to, or badly. What it was ordered and has `Taken`, it finishes even if this process is
    killed.
    """

    def __init__(self, opened: Open, slots: Sequence[Slot], heard: Callable[[Answer], None]) -> None:
        """Start it; `wait_ready` says whether it works. Raise `PeerError` if no process can be started."""
        self._rank = opened.rank
        self._heard = heard
        self._ready = threading.Event()
        self._over = threading.Event()
        self._closing = False
        self._death: str | None = None
        self._last_words = os.memfd_create("resilient-writer-errors", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours, send_timeout_s=_SEND_TIMEOUT_S)
        try:
            self._process = self._start([theirs.fileno(), *(slot.file for slot in slots)])
        except OSError as error:
            self._release()
            raise PeerError(
                f"the writer process of rank {self._rank} cannot be started: {error}", kind=ErrorKind.PEER_FAILED
            ) from error
        finally:
            theirs.close()
        # A daemon: it ends with the process that it listens to, for which nobody waits here.
        threading.Thread(target=self._listen, name=f"resilient-heard-{self._rank}", daemon=True).start()
        with suppress(PeerError):  # it has ended already: `Died` says why
            self._order(opened)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._closing and not self._over.is_set()

    def wait_ready(self, timeout_s: float) -> None:
        in_time = self._ready.wait(timeout_s)
        if self._death is not None:
            raise PeerError(self._death, kind=ErrorKind.PEER_FAILED)
        if not in_time:
            raise PeerError(
                f"the writer process of rank {self._rank} ({self.pid}) is not ready after {timeout_s:g} s",
                kind=ErrorKind.PEER_TIMEOUT,
                hint="the machine may be short of memory or processors",
            )

    def define(self, structure: Structure) -> None:
        self._order(structure)

    def save(self, order: Save) -> None:
        self._order(order)

    def abandon(self, step: int, why: str) -> None:
        self._order(Abandon(step=step, why=why))

    def kill(self) -> None:
        self._process.kill()

    def close(self, timeout_s: float) -> bool:
        if not self._closing:
            with suppress(PeerError):  # it is gone already
                self._order(Close())
            self._closing = True
        return self._over.wait(timeout_s)

    def _start(self, files: Sequence[int]) -> subprocess.Popen[bytes]:
        words = ["rank", str(self._rank), "of", "process", str(os.getpid()), "files", ",".join(map(str, files))]
        # The same modules as here, wherever they come from; and none that happen to lie in the working directory.
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)  # noqa: PTH100 -- entries may be empty
        with _deaf():
            return subprocess.Popen(  # noqa: S603 -- our own interpreter and module
                [sys.executable, "-P", "-m", "resilient.writer", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._last_words,
                start_new_session=True,
                pass_fds=files,
                env=environment_with(PYTHONPATH=path, OPENBLAS_NUM_THREADS="1"),
            )

    def _order(self, order: Order) -> None:
        if self._death is not None or not self.alive:
            raise self._gone()
        try:
            self._wire.send(order)
        except OSError as error:
            self._wire.hang_up()  # it may have heard half of this: it finishes what it had taken, and ends
            raise self._gone() from error

    def _gone(self) -> PeerError:
        what = self._death or f"the writer process of rank {self._rank} ({self.pid}) takes no orders any more"
        return PeerError(what, kind=ErrorKind.PEER_FAILED)

    def _listen(self) -> None:
        while (answer := self._wire.receive(ANSWERS, lambda: self._process.poll() is not None)) is not None:
            tell(self._heard, answer)
            if isinstance(answer, Ready):
                self._ready.set()  # after that: who waited for it may ask what was heard
        status = self._reap()
        if status != 0 or not self._closing:
            self._death = f"the writer process of rank {self._rank} ({self.pid}) {self._end(status)}"
        self._ready.set()
        if self._death is not None:
            tell(self._heard, Died(why=self._death))
        self._release()
        self._over.set()

    def _reap(self) -> int | None:
        try:
            return self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return None

    def _end(self, status: int | None) -> str:
        if status is None:
            end = "has closed its connection and goes on"
        elif status < 0:
            end = f"was killed by {_signal(-status)}"
        else:
            end = f"ended with status {status}"
        size = os.fstat(self._last_words).st_size
        tail = os.pread(self._last_words, _LAST_WORDS, max(0, size - _LAST_WORDS)).decode(errors="replace").strip()
        return f"{end}: {tail}" if tail else end

    def _release(self) -> None:
        self._wire.close()
        os.close(self._last_words)


@contextmanager
def _deaf() -> Iterator[None]:
    """Let a process that is started now be born with the signals blocked that it will ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
