"""The states of the random number generators of a process: Python's, NumPy's, torch's, and the accelerator's."""

from __future__ import annotations

import random  # noqa: TID251 -- this module saves and restores the global generator; it draws nothing
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

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all states, as tensors and numbers."""
        version, words, gauss = random.getstate()
        # The global generators are the subject here, whatever one should use instead.
        algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
        if algorithm != "MT19937":
            raise UsageError(
                f"NumPy's global generator is a {algorithm}, not the MT19937 that it starts as",
                kind=ErrorKind.UNSAVEABLE,
                hint="use a numpy.random.Generator of your own, and track its bit_generator.state",
            )
        found = {
            "python": {"version": version, "words": torch.from_numpy(np.array(words, dtype=np.uint32)), "gauss": gauss},
            "numpy": {
                "keys": torch.from_numpy(np.array(keys, dtype=np.uint32)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            },
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
