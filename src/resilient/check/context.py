"""What the checks of one run are told."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from resilient.check.limits import Limits

Level: TypeAlias = Literal["light", "full"]


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """``root`` is where ``/sys``, ``/proc`` and ``/dev`` lie: tests give a folder with recorded ones."""

    level: Level = "light"
    places: tuple[str, ...] = ()
    root: str = "/"
    limits: Limits = Limits()

    @property
    def full(self) -> bool:
        return self.level == "full"

    def path(self, *names: str) -> Path:
        return Path(self.root).joinpath(*names)

    def chosen(self, light: float, full: float) -> float:
        """Return one of two amounts, by the level."""
        return full if self.full else light

    @property
    def folders(self) -> tuple[Path, ...]:
        """The directories whose disks are looked at: those among the places, or else that of temporary files."""
        found = tuple(Path(place) for place in self.places if "://" not in place)
        return found or ((Path(tempfile.gettempdir()),) if not self.places else ())


def read_text(path: Path) -> str | None:
    """Return a line of sysfs or procfs without its end; None where there is none, or a driver refuses to tell."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> int | None:
    """Return a whole number that a file of sysfs holds; None as for `read_text`."""
    text = read_text(path)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None
