"""What stored bytes pass through lies as they lie in their file, and in memory that a disk takes in large pieces."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from resilient.engine.bounce import Bounce

HUGE_PAGE_NBYTES = 2 << 20


def flags_of_mapping(address: int) -> list[str]:
    """Return what the kernel says of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
@pytest.mark.parametrize("nbytes", [1, 4 << 20, (4 << 20) + 1])
def test_memory_begins_with_a_huge_page_and_asks_for_more(nbytes: int) -> None:
    memory = Bounce(()).take("stored", nbytes)
    assert memory.data_ptr() % HUGE_PAGE_NBYTES == 0
    last = memory.data_ptr() + nbytes - 1
    assert "hg" in flags_of_mapping(memory.data_ptr())
    assert "hg" in flags_of_mapping(last)


def test_memory_lies_in_its_page_as_asked_and_is_used_again_while_it_is_large_enough() -> None:
    bounce = Bounce(())
    first = bounce.take("stored", 5 << 20)
    for at in (0, 1, mmap.PAGESIZE - 1, 7 * mmap.PAGESIZE + 13):
        memory = bounce.take("stored", 5 << 20, at)
        assert memory.numel() == 5 << 20
        assert memory.data_ptr() % mmap.PAGESIZE == at % mmap.PAGESIZE
        assert memory.data_ptr() - first.data_ptr() < mmap.PAGESIZE, "the same memory"
    memory.fill_(7)
    other, larger = bounce.take("decoded", 5 << 20), bounce.take("stored", 9 << 20)
    other.fill_(1)
    larger.fill_(2)
    assert torch.equal(memory, torch.full_like(memory, 7)), "who still has the memory keeps what is in it"
