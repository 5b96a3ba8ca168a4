"""Signals are noticed at once, beside what handled them before, which is put back; children are as if nothing were."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from resilient.detect.signals import StopSignals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _interrupts_are_not_ignored() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # they are, if a shell runs the tests in the background


@contextmanager
def listening(*numbers: int) -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in ALL}
    signals = StopSignals(numbers or ALL)
    left = signals.install()
    try:
        assert not left
        yield signals
    finally:
        signals.close()
    assert {number: signal.getsignal(number) for number in ALL} == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", ALL)
def test_a_signal_is_noticed_and_ends_nothing(number: int) -> None:
    with listening() as signals:
        os.kill(os.getpid(), number)
        assert signals.wait(10) == {number}
        assert signals.wait(0) == set()


def test_the_handler_that_was_there_is_called_and_put_back() -> None:
    heard: list[int] = []

    def theirs(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        with listening() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.wait(10) == {signal.SIGUSR1}
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_program_has_set_since_stays() -> None:
    theirs = lambda number, frame: None
    before = signal.getsignal(signal.SIGUSR2)
    signals = StopSignals(ALL)
    signals.install()
    signal.signal(signal.SIGUSR2, theirs)
    signals.close()
    assert signal.signal(signal.SIGUSR2, before) is theirs


def test_the_second_interrupt_interrupts() -> None:
    with listening() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(10) == {signal.SIGINT}
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("ignored", [True, False])
def test_what_is_ignored_or_handled_by_native_code_is_left_alone(ignored: bool) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    if ignored:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    else:
        faulthandler.register(signal.SIGUSR1, file=2)
    signals = StopSignals(ALL)
    try:
        assert signals.install() == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.wait(0.1) == set()
    finally:
        signals.close()
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_signals_are_left_alone() -> None:
    signals = StopSignals(ALL)
    left: list[int] = []
    thread = threading.Thread(target=lambda: left.extend(signals.install()))
    thread.start()
    thread.join()
    signals.close()
    assert left == list(ALL)


def test_a_signal_is_noticed_while_the_main_thread_is_in_native_code() -> None:
    with listening() as signals:
        found: list[tuple[set[int], float]] = []

        def look() -> None:
            time.sleep(0.05)
            sent_s = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            found.append((signals.wait(60), time.monotonic() - sent_s))

        thread = threading.Thread(target=look)
        noise = os.urandom(60 << 20)
        started_s = time.monotonic()
        thread.start()
        zlib.compress(noise, 9)  # a second or more, in which no handler in Python runs
        took_s = time.monotonic() - started_s
        thread.join(60)
        assert found[0][0] == {signal.SIGTERM}
        assert found[0][1] < took_s / 2


def test_whoever_listened_before_still_hears() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        signals = StopSignals(ALL)
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.wait(10) == {signal.SIGUSR2}
        assert signal.SIGUSR2 in ours.recv(100)
        signals.close()
    finally:
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
        ours.close()
        theirs.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_as_if_nobody_listened() -> None:
    with listening() as signals:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(3)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert signals.wait(0.1) == set(), "the signal of the child was taken for one of this process"


def test_a_signal_is_noticed_where_descriptors_have_large_numbers_and_one_wait_returns_all_that_came() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(2048, before[1])), before[1]))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:
            held.append(os.dup(0))
        with listening() as signals:
            assert signals._woken.fileno() >= 1024
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.wait(10) == {signal.SIGTERM}
            signals._called.append(signal.SIGUSR1)  # as if its byte had found no room
            assert signals.wait(0) == {signal.SIGUSR1}
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
