"""What two nodes do together: compute, all-reduce, compare with what must come out, and compare their clocks.

Runs in a process of its own for each test: a collective that hangs or crashes takes nothing else with it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import torch
import torch.distributed as dist

from resilient.check.pairs import Outcome
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline

_MATRIX = {"cpu": 128, "cuda": 8192}
_PRODUCTS = 8
_ECHOES = 30
_SEED = 20240502
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A test of two nodes: ``side`` is 0 or 1. ``nbytes`` are all-reduced each time, for ``duration_s`` in all."""

    wave: int
    side: int
    backend: str
    nbytes: int
    duration_s: float
    timeout_s: float


class Work:
    """What is timed. Tests derive slow and wrong nodes from it."""

    def __init__(self, device: torch.device) -> None:
        source = torch.Generator().manual_seed(_SEED)
        size = _MATRIX[device.type]
        kind = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._matrix = torch.randn(size, size, generator=source).to(device, kind)
        self._into = torch.empty_like(self._matrix)

    def compute(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._matrix, self._matrix, out=self._into)

    def all_reduce(self, values: torch.Tensor) -> None:
        dist.all_reduce(values)


def take_turn(turn: Turn, store: dist.Store, work: type[Work] = Work, clock: Clock = SYSTEM_CLOCK) -> Outcome:
    """Do one test with the node on the other side, over ``store``, which is theirs alone; return what was seen.

    Raises:
        RuntimeError: torch's, for a partner that does not come, is gone, or does not answer within the timeout.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if turn.backend == "nccl" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if turn.backend == "nccl" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=turn.side, world_size=2, timeout=timedelta(seconds=turn.timeout_s)
    )
    try:
        offset_s, doubt_s = clock_offset(turn.side, clock)
        outcome = _measure(turn, work(device), device, clock)
    finally:
        dist.destroy_process_group()
    return msgspec.structs.replace(outcome, offset_s=offset_s, doubt_s=doubt_s)


def _measure(turn: Turn, work: Work, device: torch.device, clock: Clock) -> Outcome:
    count = turn.nbytes // 4
    own, wanted = _values(turn.side, count, device), _values(0, count, device) + _values(1, count, device)
    values = own.clone()
    whole_s, exchange_s, wrong, done = float("inf"), float("inf"), 0, 0
    deadline = Deadline(clock, turn.duration_s)
    while _go_on(deadline, done):  # which is a barrier, too
        start = clock.monotonic()
        work.compute()
        _wait(device)
        values.copy_(own)
        work.all_reduce(values)
        _wait(device)
        whole_s = min(whole_s, clock.monotonic() - start)
        wrong += not torch.equal(values, wanted)
        dist.barrier()
        values.copy_(own)
        _wait(device)
        start = clock.monotonic()
        work.all_reduce(values)
        _wait(device)
        exchange_s = min(exchange_s, clock.monotonic() - start)
        done += 1
    why = f"{wrong} of {done} sums were wrong" if wrong else ""
    return Outcome(why=why, seconds=whole_s, exchange_s=exchange_s, nbytes=turn.nbytes)


def _go_on(deadline: Deadline, done: int) -> bool:
    """Return whether there is time left; both sides stop after the same turn, as side 0 says."""
    word = torch.tensor([not deadline.expired or done < 3], dtype=torch.int32)
    dist.broadcast(word, src=0)
    return bool(word.item())


def _values(side: int, count: int, device: torch.device) -> torch.Tensor:
    """Return small whole numbers, whose sums float32 holds exactly."""
    return (torch.arange(count, device=device) * (side + 3) % 1021).float()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_offset(side: int, clock: Clock = SYSTEM_CLOCK) -> tuple[float, float]:
    """Return by how many seconds the partner's clock is ahead, and how far that may be wrong: half a round trip.

    Of several echoes the quickest counts, as in NTP.
    """
    best_offset, best_trip = 0.0, float("inf")
    for asking in (0, 1):
        for _ in range(_ECHOES):
            if side == asking:
                sent = _now_s(clock)
                dist.send(torch.zeros(1, dtype=torch.float64), dst=1 - side)
                answer = torch.zeros(1, dtype=torch.float64)
                dist.recv(answer, src=1 - side)
                received = _now_s(clock)
                if received - sent < best_trip:
                    best_trip = received - sent
                    best_offset = float(answer.item()) - (sent + received) / 2
            else:
                dist.recv(torch.zeros(1, dtype=torch.float64), src=asking)
                dist.send(torch.tensor([_now_s(clock)], dtype=torch.float64), dst=asking)
    return best_offset, best_trip / 2


def _now_s(clock: Clock) -> float:
    # Since 2020, not 1970: so close a number has more digits behind the point.
    return (clock.now() - _EPOCH).total_seconds()
