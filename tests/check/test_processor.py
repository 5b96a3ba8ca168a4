"""The processor's arithmetic: the reference is right, and a wrong or slow core is named."""

from __future__ import annotations

import math
import os
import struct

import pytest

from resilient.check import processor
from resilient.check.limits import Limits
from resilient.check.processor import Core, judge, measure
from resilient.check.result import Status
from resilient.format.digest import digest


def test_the_reference_is_what_exact_rounding_gives() -> None:
    """Computed once more without numpy: IEEE 754 leaves no choice, so any right processor has these bits."""
    length, rounds = processor._LENGTH, processor._ROUNDS
    numbers, words = [float(n) for n in range(1, length + 1)], list(range(1, length + 1))
    for _ in range(rounds):
        numbers = [math.sqrt(x * x * 0.75 + 1.25) / (1.0 + x * 0.001953125) for x in numbers]
        words = [(n ^ (n << 13)) & 0xFFFF_FFFF_FFFF_FFFF for n in words]
        words = [n ^ (n >> 7) for n in words]
        words = [(n * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF for n in words]
    content = struct.pack(f"={length}d", *numbers) + struct.pack(f"={length}Q", *words)
    assert digest(content).hex() == processor.REFERENCE


def test_every_core_of_this_machine_computes_right() -> None:
    cores = sorted(os.sched_getaffinity(0))
    found = measure(cores, 0.2)
    assert sorted(found) == cores
    assert all(core.done >= 2 and core.wrong == 0 for core in found.values())
    assert sorted(os.sched_getaffinity(0)) == cores, "only threads of the check were bound"


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = processor.work()
    monkeypatch.setattr(processor, "work", lambda: bytes([right[0] ^ 1]) + right[1:])
    (core,) = measure(sorted(os.sched_getaffinity(0))[:1], 0.01).values()
    assert core.wrong == core.done


def test_the_core_that_is_wrong_or_slow_is_named() -> None:
    well = Core(wrong=0, done=100, best_s=1e-3)
    found = judge(
        {0: well, 1: well, 2: Core(wrong=3, done=100, best_s=1e-3), 3: Core(wrong=0, done=9, best_s=3e-3)}, Limits()
    )
    assert [(each.status, each.subject) for each in found] == [("failed", "core 2"), ("slow", "core 3")]
    assert found[0].line == "core 2 computed a wrong result in 3 of 100 tries"
    assert found[1].line == "core 3 is 3.0 times slower than this node's median core"
    (one,) = judge({0: well, 1: Core(wrong=0, done=100, best_s=1.6e-3)}, Limits())
    assert one.status is Status.OK
