"""The memory that states are staged in: one slot or two, kept for ever, and touched before they are needed.

The first touch of memory takes several times as long as a copy into it. A slot is a file without a name (``memfd``), so
the size of ``/dev/shm``, 64 MB in many containers, does not limit it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Final

import torch

from resilient.engine.host_memory import available_nbytes
from resilient.errors import ErrorKind, StoreError
from resilient.format.sizes import in_words
from resilient.policy.memory import MOST_SLOTS, slots_that_fit
from resilient.writer.slot import HEADER_NBYTES, Slot

_BLOCK_NBYTES: Final = 1 << 20
"""While a block is mapped, other threads cannot map memory, or start a thread, as training and its first save do."""

_NICENESS: Final = 10
_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; an older one touches when it copies
_CLOSE_TIMEOUT_S: Final = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes, _madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int


class Arena:
    """The slots of a rank; calls may come from any thread.

    All ``slots`` exist from the beginning, empty, so that their files can be handed to a writer; how many of them are
    used is decided when the size of the state is known.

    Args:
        slots: how many to use; None: two if they fit in half of the memory that is available, else one.
        notice: is told what a person should know.
        available: how many bytes this process may still take.
        pinned: lock the memory for an accelerator, so that it can copy into it by itself.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        notice: Callable[[str], None],
        available: Callable[[], int] = available_nbytes,
        pinned: bool | None = None,
    ) -> None:
        self.slots = tuple(Slot.create(f"slot-{number}") for number in range(MOST_SLOTS))
        self._wanted = slots
        self._notice = notice
        self._available = available
        self._pins = torch.cuda.is_available() if pinned is None else pinned
        self._pinned: dict[int, int] = {}  # the address of what is pinned of a slot, by its number
        self._count = 1
        self._nbytes = -1
        self._taken: set[int] = set()
        self._lock = threading.RLock()
        self._touching = threading.Lock()  # two threads at once would keep others from mapping memory twice as long
        self._touched: dict[int, tuple[int, int]] = {}  # address and size of what is touched of a slot, by its number
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def count(self) -> int:
        """How many slots are used."""
        return self._count

    @property
    def is_free(self) -> bool:
        """Whether there is a free slot."""
        with self._lock:
            return len(self._taken) < self._count

    def free_slot(self) -> Slot | None:
        """Take a free slot, if there is one; it belongs to the caller until `release`."""
        with self._lock:
            for number in range(self._count):
                if number not in self._taken:
                    self._taken.add(number)
                    return self.slots[number]
            return None

    def release(self, slot: Slot) -> None:
        """Give a slot back. Idempotent."""
        with self._lock:
            self._taken.discard(self.slots.index(slot))

    def fit(self, slot: Slot, nbytes: int) -> None:
        """Make room in a slot that the caller has taken.

        Raises:
            StoreError: kind ``no-space``: there is not enough memory for one copy of the state.
        """
        with self._lock:
            self._decide(nbytes)
            self._grow(slot, nbytes)

    def prepare(self, nbytes: int) -> None:
        """Make room in the free slots, and touch it in the background; returns at once, raises what `fit` raises."""
        with self._lock:
            self._decide(nbytes)
            slots = [slot for number, slot in enumerate(self.slots[: self._count]) if number not in self._taken]
            for slot in slots:
                self._grow(slot, nbytes)
            thread = threading.Thread(target=self._touch, args=(slots,), name="resilient-touch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def touched(self, timeout_s: float) -> bool:
        """Wait until what was prepared is touched; say whether it is."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Give the memory back; a writer that has it mapped keeps what it needs. Idempotent."""
        self._stop.set()
        self.touched(_CLOSE_TIMEOUT_S)
        with self._lock:
            for slot in self.slots:
                self._unpin(slot)
                slot.close()

    def _decide(self, nbytes: int) -> None:
        if nbytes <= self._nbytes:
            return
        held = sum(os.fstat(slot.file).st_blocks * 512 for slot in self.slots)
        room = self._available() + held
        count = slots_that_fit(nbytes, room, wanted=self._wanted)
        if count == 0:
            raise StoreError(
                f"a staged copy of the state takes {in_words(nbytes)}, and {in_words(room)} of memory are available",
                kind=ErrorKind.NO_SPACE,
                hint="give the job more memory, or shard the state over more ranks (fully_shard)",
            )
        if count < (self._wanted or MOST_SLOTS):
            self._notice(
                f"states are staged in one slot of {in_words(nbytes)}: two would take more than"
                f" {'half of ' if self._wanted is None else ''}the {in_words(room)} of memory that are available;"
                " a save waits until the one before is written"
            )
        self._count = count
        self._nbytes = nbytes

    def _grow(self, slot: Slot, nbytes: int) -> None:
        if nbytes > slot.nbytes:
            self._unpin(slot)
            slot.grow(nbytes)

    def _touch(self, slots: list[Slot]) -> None:
        """Have the system find the memory for some slots, block by block; what they hold stays."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with self._touching:
            for slot in slots:
                with self._lock:
                    payload, address, file = slot.payload, slot.address, slot.file  # the view keeps it where it is
                number, extent = self.slots.index(slot), (address, len(payload))
                if self._touched.get(number) == extent:
                    continue
                for start in range(0, len(payload), _BLOCK_NBYTES):
                    nbytes = min(_BLOCK_NBYTES, len(payload) - start)
                    if self._stop.is_set():
                        return
                    try:
                        os.posix_fallocate(file, HEADER_NBYTES + start, nbytes)
                    except OSError as error:
                        self._notice(f"memory for staging could not be reserved: {error}")
                        return
                    _madvise(address + start, nbytes, _MADV_POPULATE_WRITE)
                self._touched[number] = extent
                if self._pins:
                    self._pin(slot)

    def _pin(self, slot: Slot) -> None:
        with self._lock:
            number = self.slots.index(slot)
            if number not in self._pinned and not self._stop.is_set():
                error = torch.cuda.cudart().cudaHostRegister(slot.address, slot.nbytes, 0)  # type: ignore[no-untyped-call]
                if int(error) != 0:
                    self._notice(f"memory for staging could not be pinned (CUDA error {int(error)}): copies are slower")
                    return
                self._pinned[number] = slot.address

    def _unpin(self, slot: Slot) -> None:
        address = self._pinned.pop(self.slots.index(slot), None)
        if address is not None:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
