"""The memory for staging: found before it is needed, as much as fits, and never handed out twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilient.engine import arena as arena_module
from resilient.engine.arena import Arena
from resilient.errors import ErrorKind, StoreError

MIB = 1 << 20


@contextmanager
def arena(room: int = 1 << 40, *, slots: int | None = None) -> Iterator[tuple[Arena, list[str]]]:
    notices: list[str] = []
    made = Arena(slots=slots, notice=notices.append, available=lambda: room)
    try:
        yield made, notices
    finally:
        made.close()


def resident(address: int) -> int:
    """Return how many bytes of the mapping at an address this process has in its page tables."""
    text = Path("/proc/self/smaps").read_text()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if first <= address < last:
            (kilobytes,) = re.findall(r"^Rss:\s+(\d+) kB", mapping, re.MULTILINE)
            return int(kilobytes) << 10
    raise AssertionError("not mapped")


def test_what_is_prepared_is_touched_before_it_is_needed() -> None:
    with arena() as (made, notices):
        made.prepare(40 * MIB)
        assert made.touched(30)
        assert made.count == 2
        for slot in made.slots:
            assert slot.nbytes >= 40 * MIB
            assert os.fstat(slot.file).st_blocks * 512 >= 40 * MIB
            assert resident(slot.address) >= 40 * MIB
        assert not notices


def test_what_is_touched_is_not_touched_again_unless_it_is_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(arena_module, "_madvise", lambda _, nbytes, __: touched.append(nbytes))
    with arena() as (made, _):
        for nbytes in (3 * MIB, 3 * MIB, 2 * MIB, 5 * MIB, 5 * MIB):
            made.prepare(nbytes)
            assert made.touched(30)
        assert sum(touched) == len(made.slots) * (3 + 5) * MIB
        assert max(touched) <= MIB, "nobody else can map memory meanwhile"


def test_what_a_slot_holds_stays_when_more_is_prepared() -> None:
    with arena() as (made, _):
        slot = made.free_slot()
        assert slot is not None
        made.fit(slot, MIB)
        slot.payload[:4] = b"abcd"
        made.prepare(5 * MIB)
        assert made.touched(30)
        assert slot.nbytes < 5 * MIB, "in use: somebody reads where it is mapped"
        made.release(slot)
        made.prepare(5 * MIB)
        assert made.touched(30)
        assert slot.nbytes >= 5 * MIB
        assert bytes(slot.payload[:4]) == b"abcd"


def test_a_slot_belongs_to_one_save_at_a_time() -> None:
    with arena() as (made, _):
        made.prepare(MIB)
        one, other = made.free_slot(), made.free_slot()
        assert one is not None
        assert other is not None
        assert one is not other
        assert made.free_slot() is None
        made.release(one)
        made.release(one)
        assert made.free_slot() is one
        assert made.free_slot() is None


def test_two_threads_never_get_the_same_slot() -> None:
    with arena() as (made, _):
        made.prepare(MIB)
        held = threading.Lock(), threading.Lock()

        def use() -> None:
            for _ in range(300):
                slot = made.free_slot()
                if slot is not None:
                    lock = held[made.slots.index(slot)]
                    assert lock.acquire(blocking=False)
                    lock.release()
                    made.release(slot)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def test_one_slot_is_used_where_two_would_take_more_than_half_of_the_memory_and_it_is_said() -> None:
    with arena(3 << 30) as (made, notices):
        made.prepare(1 << 20)
        assert made.count == 2
    with arena(3 * MIB) as (made, notices):
        made.prepare(MIB)
        assert made.count == 1
        (notice,) = notices
        assert "one slot of 1.0 MiB" in notice
        assert made.free_slot() is not None
        assert not made.is_free
        made.prepare(MIB)
        assert len(notices) == 1, "said once"


def test_the_number_of_slots_can_be_set() -> None:
    with arena(3 * MIB, slots=2) as (made, notices):
        made.prepare(MIB)
        assert (made.count, notices) == (2, [])
    with arena(slots=1) as (made, notices):
        made.prepare(MIB)
        assert (made.count, notices) == (1, [])


def test_a_state_that_does_not_fit_is_refused_before_it_is_touched() -> None:
    with arena(MIB) as (made, _):
        with pytest.raises(StoreError, match=r"takes 10\.0 MiB, and 1\.0 MiB of memory are available") as caught:
            made.prepare(10 * MIB)
        assert caught.value.kind is ErrorKind.NO_SPACE
        slot = made.free_slot()
        assert slot is not None
        with pytest.raises(StoreError):
            made.fit(slot, 10 * MIB)
        assert slot.nbytes == 0


def test_a_larger_state_gets_the_room_of_what_the_arena_has_already() -> None:
    rooms = [100 * MIB]
    made = Arena(notice=print, available=lambda: rooms[0])
    made.prepare(10 * MIB)
    assert made.touched(30)
    rooms[0] = 80 * MIB  # what was touched is gone from it
    made.prepare(24 * MIB)
    assert made.count == 2
    made.close()


SMALL_SHM = """
import os, sys
os.makedirs("/dev/shm", exist_ok=True)
subprocess_ok = os.system("mount -t tmpfs -o size=64m tmpfs /dev/shm") == 0
if not subprocess_ok:
    sys.exit(77)
assert os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks == 64 << 20
from resilient.engine import arena as arena_module
from resilient.engine.arena import Arena
arena = Arena(notice=print)
arena.prepare(100 << 20)
assert arena.touched(60)
assert all(os.fstat(slot.file).st_blocks * 512 >= 100 << 20 for slot in arena.slots)
arena.close()
"""


def test_a_dev_shm_of_64_mb_does_not_matter() -> None:
    run = [sys.executable, "-c", SMALL_SHM]
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", *run], check=False, capture_output=True)
    if b"unshare" in done.stderr or done.returncode == 77:
        pytest.skip("this system permits no mount of its own")
    assert done.returncode == 0, done.stderr.decode()
