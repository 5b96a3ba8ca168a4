"""How many small requests to a store are made at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from resilient.catalog.process import played
from resilient.clock import SYSTEM_CLOCK

A = TypeVar("A")
R = TypeVar("R")

_THREADS: Final = 16
_AHEAD: Final = 2
_TRIED_FIRST: Final = 3
_QUICK_S: Final = 0.002


def each(call: Callable[[A], R], arguments: Sequence[A], *, threads: int = _THREADS) -> list[R]:
    """Return what ``call`` makes of each argument, in order, or raise the first error; at most ``threads`` at once."""
    return list(in_order(call, arguments, threads=threads))


def in_order(call: Callable[[A], R], arguments: Sequence[A], *, threads: int = _THREADS) -> Iterator[R]:
    """Yield what ``call`` makes of each argument, in order, or raise the first error; at most ``threads`` at once.

    A request to an object store is a round trip of tens of milliseconds: a thousand of them one after another are a
    minute. On a local disk it takes microseconds, and threads would only fight for the interpreter: the first few
    calls tell. A simulation decides itself what happens at once, and needs no threads.
    """
    started_s = SYSTEM_CLOCK.monotonic()
    first = [call(argument) for argument in arguments[:_TRIED_FIRST]]
    quick = SYSTEM_CLOCK.monotonic() - started_s < _QUICK_S * _TRIED_FIRST
    rest = arguments[_TRIED_FIRST:]
    yield from first
    del first
    if quick or not rest or played() is not None:
        yield from map(call, rest)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(min(threads, len(rest)), thread_name_prefix="resilient-catalog") as pool:
        try:
            for argument in rest:
                # Results that nobody has taken yet would fill the memory: not many more are asked for than are in work.
                if len(waiting) >= _AHEAD * threads:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(call, argument))
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
