"""The public conformance suite, and what else the tests of stores share."""

from __future__ import annotations

from pathlib import Path

from resilient.testing.conformance import StoreConformance, together


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


__all__ = ["StoreConformance", "names_in", "together"]
