"""The ranks of one life of a job find each other in a store that holds what earlier lives left."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient.engine.meeting import meet
from resilient.engine.peers import _OwnMemory
from resilient.errors import ErrorKind, PeerError


def test_each_life_has_a_nonce_of_its_own_whatever_earlier_lives_left() -> None:
    seed = 7
    print("seed", seed)
    draw, values, nonces = random.Random(seed), _OwnMemory(), set()

    def come(rank: int, size: int, delay_s: float) -> str:
        time.sleep(delay_s)
        return meet(values, rank, size, timeout_s=20)

    for _ in range(15):
        size = draw.randint(2, 5)
        delays = [draw.choice([0.0, 0.0, 0.02, 0.05]) for _ in range(size)]
        with ThreadPoolExecutor(size) as pool:
            found = set(pool.map(come, range(size), [size] * size, delays))
        assert len(found) == 1
        nonces |= found
    assert len(nonces) == 15


def test_who_does_not_come_is_named() -> None:
    values = _OwnMemory()
    with ThreadPoolExecutor(2) as pool:
        lives = [pool.submit(meet, values, rank, 3, timeout_s=0.3) for rank in (0, 2)]
        with pytest.raises(PeerError, match="rank 1 did not come within") as caught:
            lives[0].result()
        assert caught.value.kind is ErrorKind.PEER_TIMEOUT
        lives[1].result()
    with pytest.raises(PeerError, match="rank 0 did not come"):
        meet(_OwnMemory(), 1, 2, timeout_s=0.05)


def test_a_rank_that_died_while_it_was_greeting_is_not_taken_for_the_one_that_follows() -> None:
    values = _OwnMemory()
    with pytest.raises(PeerError):
        meet(values, 1, 2, timeout_s=0.05)  # said hello, and is gone
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, values, 0, 2, timeout_s=20)
        time.sleep(0.1)
        assert not first.done()
        assert pool.submit(meet, values, 1, 2, timeout_s=20).result() == first.result()
