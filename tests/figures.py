"""Where a proof writes down what it measured: a JSON line a round, so that a killed proof goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Figure: TypeAlias = str | int | float | bool


class Figures:
    """The rounds of one proof, in a file that only grows. ``len()`` is the number of rounds that are done.

    A round whose line was torn by a kill does not count and is written again.
    """

    def __init__(self, path: Path, title: str) -> None:
        self.path = path
        self.title = title
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rounds = list(_read(path))

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[dict[str, Figure]]:
        return iter(self._rounds)

    def add(self, **figures: Figure) -> None:
        """Write down one round that held what it had to."""
        if not self.path.exists() or _torn(self.path):
            lines = [{"proof": self.title}, *self._rounds]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with self.path.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        self._rounds.append(figures)


def titled(path: Path) -> tuple[str, list[dict[str, Figure]]]:
    """Return a proof's title and its rounds."""
    title: str = json.loads(path.read_text().partition("\n")[0])["proof"]
    return title, list(_read(path))


def _read(path: Path) -> Iterator[dict[str, Figure]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and "proof" not in (members := json.loads(line)):
            yield members


def _torn(path: Path) -> bool:
    return not path.read_text().endswith("\n")
