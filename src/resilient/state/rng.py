"""The states of the random number generators of a process: Python's, NumPy's, torch's, and the accelerator's."""

from __future__ import annotations

import ctypes
import random  # noqa: TID251 -- this module saves and restores the global generator; it draws nothing
import sys
from array import array
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from resilient.errors import ErrorKind, UsageError
from resilient.format.digest import digest_of_parts


class Rng:
    """An item: the global generators of each rank. A rank that has no saved state gets its own, derived by rule.

    Two restarts of one checkpoint on one number of ranks give every rank the same numbers.
    """

    def __init__(self) -> None:
        self._numpy = _NumPy()
        self._held: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """What is saved: the states at the last `hold`, or of now if there was none."""
        return self.snapshot() if self._held is None else self._held

    def hold(self) -> None:
        """Take the states as they are now; what is drawn from now on moves the generators, and not what is saved."""
        self._held = self.snapshot()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all states, as tensors and numbers."""
        version, words, gauss = random.getstate()
        found: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.frombuffer(array("I", words), dtype=torch.uint32),
                "gauss": gauss,
            },
            "numpy": self._numpy.state(),
            "torch": torch.get_rng_state(),
        }
        accelerator = _accelerator()
        if accelerator is not None:
            kind, module = accelerator
            found["accelerator"] = {"kind": kind, "state": module.get_rng_state().cpu()}
        return found

    def restore(self, snapshot: Mapping[str, Any], *, step: int, rank: int) -> None:
        """Set all generators to a snapshot's states; an accelerator's of another kind is derived instead."""
        python, numpy, saved = snapshot["python"], snapshot["numpy"], snapshot.get("accelerator")
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        state = ("MT19937", numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["gauss"])
        np.random.set_state(state)  # noqa: NPY002
        torch.set_rng_state(snapshot["torch"])
        accelerator = _accelerator()
        if accelerator is not None:
            kind, module = accelerator
            if saved is not None and saved["kind"] == kind:
                module.set_rng_state(saved["state"])
            else:
                module.manual_seed(_seed(snapshot, step, rank) & (2**63 - 1))

    def derive(self, snapshot: Mapping[str, Any], *, step: int, rank: int) -> None:
        """Seed all generators of a rank without saved state: from another rank's snapshot, the step and its number."""
        seed = _seed(snapshot, step, rank)
        random.seed(seed)
        np.random.seed([(seed >> shift) & 0xFFFFFFFF for shift in (0, 32, 64, 96)])  # noqa: NPY002
        torch.manual_seed(seed & (2**63 - 1))  # the accelerators' too


class _NumPy:
    """NumPy's global generator, asked for its state only if it may have another than before.

    To ask takes more than everything else in a snapshot, and most programs draw nothing from it between two steps.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        memory = _memory_of(np.random.get_bit_generator())  # type: ignore[attr-defined]  # numpy 2.4 forgets it
        # With a second normal number in store, a draw need not touch the words.
        if memory is None or memory != self._memory or self._state["has_gauss"]:
            # The global generators are the subject here, whatever one should use instead.
            algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
            if algorithm != "MT19937":
                raise UsageError(
                    f"NumPy's global generator is a {algorithm}, not the MT19937 that it starts as",
                    kind=ErrorKind.UNSAVEABLE,
                    hint="use a numpy.random.Generator of your own, and track its bit_generator.state",
                )
            words = np.array(keys, dtype=np.uint32)
            # Only a memory that is known to be the words and the position can say that they are what they were.
            is_known = memory == words.tobytes() + int(position).to_bytes(4, sys.byteorder)
            self._memory = memory if is_known else None
            self._state = {
                "keys": torch.from_numpy(words),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        return {**self._state, "keys": self._state["keys"].clone()}


def _memory_of(generator: Any) -> bytes | None:
    """Return what a Mersenne twister of NumPy is in memory: its words and its position."""
    if not isinstance(generator, np.random.MT19937):
        return None
    address: int = generator.ctypes.state_address
    return ctypes.string_at(address, 4 * 624 + 4)


def _seed(snapshot: Mapping[str, Any], step: int, rank: int) -> int:
    """Return 128 bits that depend on nothing else."""
    states = (snapshot["python"]["words"], snapshot["numpy"]["keys"], snapshot["torch"])
    parts = [state.contiguous().view(torch.uint8).numpy().tobytes() for state in states]
    return int.from_bytes(digest_of_parts([*parts, f"step {step} rank {rank}".encode()]), "little")


def _accelerator() -> tuple[str, ModuleType] | None:
    """Return the kind and the module of the accelerator, for its current device: a rank's number is not a device's."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else (device.type, torch.get_device_module(device))
