"""Folders that stand for a machine's ``/``: files of sysfs and procfs as Linux documents them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below ``root``, with the folders that they need."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
