"""Memory, its patterns and counters; and /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.check import shared_memory
from resilient.check.context import Context
from resilient.check.limits import GIB, MIB, Limits
from resilient.check.memory import (
    Words,
    available_nbytes,
    copy_rate,
    error_counts,
    judge_bandwidth,
    judge_errors,
    judge_patterns,
    judge_size,
    wrong_words,
)
from resilient.check.result import Status
from resilient.errors import UsageError
from resilient.testing.processes import full_dev_shm
from tests.check.roots import write

LIMITS = Limits()


@pytest.mark.parametrize("pattern", [0, 1, 2, 3, 4], ids=["zeros", "ones", "10", "01", "place"])
def test_one_bit_that_flips_under_any_pattern_is_counted(pattern: int) -> None:
    seen = 0

    def touch(words: Words) -> None:
        nonlocal seen
        if seen == pattern:
            words[len(words) // 3] ^= 1 << 17
        seen += 1

    assert wrong_words(32 * MIB, touch) == 1
    assert seen == 5
    assert judge_patterns(1, 32 * MIB).status is Status.FAILED


def test_a_stuck_address_line_is_noticed() -> None:
    """A word that is another word's mirror keeps every fixed pattern: only its own place tells."""

    def touch(words: Words) -> None:
        words[len(words) // 2] = words[0]

    assert wrong_words(32 * MIB, touch) == 1


def test_memory_that_keeps_everything_is_well() -> None:
    assert wrong_words(32 * MIB) == 0
    assert wrong_words(0) == 0
    assert judge_patterns(0, 32 * MIB).status is Status.OK
    assert copy_rate(2) > 0
    assert judge_bandwidth(5.0 * GIB, LIMITS).status is Status.OK
    assert judge_bandwidth(0.4 * GIB, LIMITS).status is Status.SLOW


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB\n"})
    assert available_nbytes(Context(root=str(tmp_path))) == (32 * GIB, 64 * GIB)
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert available_nbytes(Context(root=str(tmp_path))) == (32 * GIB, 64 * GIB)
    write(tmp_path, {"sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/memory.current": f"{7 * GIB + 1}\n"})
    assert available_nbytes(Context(root=str(tmp_path))) == (GIB - 1, 8 * GIB)
    assert judge_size(GIB - 1, 8 * GIB, LIMITS).status is Status.FAILED
    assert judge_size(GIB, 8 * GIB, LIMITS).status is Status.OK


def test_uncorrected_errors_of_a_memory_controller_fail(tmp_path: Path) -> None:
    """Linux's EDAC, as Documentation/admin-guide/ras.rst describes its files."""
    context = Context(root=str(tmp_path))
    assert judge_errors(error_counts(context)).status is Status.SKIPPED
    folder = "sys/devices/system/edac/mc"
    write(tmp_path, {f"{folder}/mc0/ue_count": "0\n", f"{folder}/mc0/ce_count": "17\n"})
    assert judge_errors(error_counts(context)).line == "none uncorrected, 17 corrected since the machine's start"
    write(tmp_path, {f"{folder}/mc1/ue_count": "2\n", f"{folder}/mc1/ce_count": "0\n"})
    result = judge_errors(error_counts(context))
    assert (result.status, result.subject) == (Status.FAILED, "mc1")


def test_dev_shm_of_64_mb_fails_with_the_fix() -> None:
    """What Docker gives if not told otherwise."""
    result = shared_memory.judge(64 * MIB, 64 * MIB, LIMITS)
    assert result.status is Status.FAILED
    assert result.line == "has only 64.0 MiB: loader workers and copies of states will die of SIGBUS"
    assert "--shm-size" in result.remedy
    assert "emptyDir" in result.remedy
    assert shared_memory.judge(16 * GIB, 15 * GIB, LIMITS).status is Status.OK
    full = shared_memory.judge(16 * GIB, 10 * MIB, LIMITS)
    assert (full.status, full.line) == (Status.FAILED, "only 10.0 MiB of 16.0 GiB are free")


def test_a_real_dev_shm_of_64_mb_fails() -> None:
    try:
        with full_dev_shm(64 * MIB):
            (result,) = shared_memory.check(Context())
    except UsageError as refused:
        pytest.skip(str(refused))
    assert result.status is Status.FAILED
    assert "64.0 MiB" in result.line


def test_no_dev_shm_at_all_fails(tmp_path: Path) -> None:
    (result,) = shared_memory.check(Context(root=str(tmp_path)))
    assert (result.status, result.line) == (Status.FAILED, "there is none")
