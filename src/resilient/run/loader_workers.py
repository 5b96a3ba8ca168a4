"""Processes that load data, which a signal to the whole group must not end: the trainer needs them for its last step.

torch's own handler ends a worker of a ``DataLoader`` at any SIGTERM that is not its trainer's own as well, SIGINT ends
its loop, and SIGUSR1 and SIGUSR2 kill it; the trainer then fails with "DataLoader worker exited unexpectedly" in the
middle of the turn that it should have saved. While a run is open, the workers of every ``DataLoader`` are made deaf to
what asks the trainer for a stop, through ``worker_init_fn``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

_OVER = b"over"


class LoaderWorkers:
    """Makes the workers that are started from `install` to `close` deaf to some signals."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._original: Callable[[Any], Iterator[Any]] | None = None
        self._file = os.memfd_create("resilient-run", os.MFD_CLOEXEC) if self._numbers else -1

    def install(self) -> None:
        if not self._numbers:
            return
        original = self._original = DataLoader.__iter__
        numbers, file = self._numbers, self._file

        @wraps(original)
        def start(loader: DataLoader[Any]) -> Iterator[Any]:
            if not loader.num_workers:
                return original(loader)
            theirs = loader.worker_init_fn
            loader.worker_init_fn = DeafWorker(numbers, os.getpid(), file, theirs)
            # Born with the signals blocked, until it has its handlers: no moment is left in between.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                return original(loader)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                loader.worker_init_fn = theirs

        DataLoader.__iter__ = start  # type: ignore[assignment,method-assign]  # until `close`

    def close(self) -> None:
        """Let workers that are still there be ended by SIGTERM, as `multiprocessing` does at exit. Idempotent."""
        if self._file == -1:
            return
        if self._original is not None:
            DataLoader.__iter__ = self._original  # type: ignore[assignment,method-assign]  # as above
        os.pwrite(self._file, _OVER, 0)
        os.close(self._file)  # the workers have it open
        self._file = -1


class DeafWorker:
    """A ``worker_init_fn``: no signal of a group ends this worker as long as its trainer lives and the run is open."""

    def __init__(
        self, numbers: tuple[int, ...], trainer: int, file: int, theirs: Callable[[int], object] | None
    ) -> None:
        self._numbers = numbers
        self._trainer = trainer
        self._parent = trainer
        self._file = file
        self._theirs = theirs

    def __call__(self, worker: int) -> None:
        self._parent = os.getppid()  # with the start method "forkserver", not the trainer itself
        with suppress(OSError):
            # A name for both: a worker that was forked, and one that was spawned and has inherited nothing.
            self._file = os.open(f"/proc/{self._trainer}/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
            for number in self._numbers:
                signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self._theirs is not None:
            self._theirs(worker)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- the signature of a handler
        if number == signal.SIGTERM and (self._is_alone() or os.pread(self._file, 1, 0)):
            os._exit(0)

    def _is_alone(self) -> bool:
        """Say whether the trainer is gone, or what forked this worker: with "forkserver" these are two processes."""
        return os.getppid() != self._parent or not Path(f"/proc/{self._trainer}").exists()
