"""What the agent and the workers of one node say to each other: small files in a directory that both know.

Files, because each side can be killed at any instant, and must not be waited for: what is said is there whole, or not
at all, and whoever comes back reads it again. torchelastic offers no channel between an agent and its workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

_ASKED: Final = "asked.json"
_PARKED: Final = "parked-"
_LISTENS: Final = "listens-"
_JOB: Final = "job"
_RESTARTING: Final = "restarting"
_AWAY: Final = "store-away"
_KEPT: Final = "kept-"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent asks of its workers at a boundary.

    ``stop``: save, and exit with the code for "requeue me". ``resize``: save, then park, until the agent restarts them.
    """

    kind: Literal["stop", "resize"]
    why: str  # for people: "SIGTERM", "a node has come", ...


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that does nothing any more, and waits for its agent to restart it.

    ``resize``: because it was asked to, with the state after ``step`` committed. ``peer-failed``: a collective failed,
    so that another rank, most likely on another node, is what failed; that must not cost this node a restart.
    """

    kind: Literal["resize", "peer-failed"]
    local_rank: int
    pid: int
    step: int | None = None


class Node:
    """The directory of one agent, seen from it or from one of its workers; `resilient.config.Process.node_dir`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._looked = False

    def ask(self, asked: Asked) -> None:
        """Ask something of the workers; what was asked last is what holds."""
        self._write(_ASKED, msgspec.json.encode(asked))

    def asked(self) -> Asked | None:
        """Return what is asked of the workers; None if nothing is. A look at a local file: often is fine.

        The first look of a process leaves a sign: an agent waits for workers that look, and not for such as never will.
        """
        if not self._looked:
            self._looked = True
            self._write(f"{_LISTENS}{os.getpid()}", b"")
        return self.asked_last()

    def asked_last(self) -> Asked | None:
        """Return the same for the agent itself, which is none of those that have to listen."""
        try:
            return msgspec.json.decode((self.directory / _ASKED).read_bytes(), type=Asked)
        except FileNotFoundError:
            return None

    def park(self, parked: Parked) -> None:
        """Say that a worker waits for its agent."""
        self._write(f"{_PARKED}{parked.local_rank}", msgspec.json.encode(parked))

    def parked(self) -> list[Parked]:
        """Return the workers that wait for their agent, by local rank."""
        found = [msgspec.json.decode(path.read_bytes(), type=Parked) for path in self.directory.glob(f"{_PARKED}*")]
        return sorted(found, key=lambda one: one.local_rank)

    def listen(self) -> int:
        """Return how many processes have ever looked at what is asked of them."""
        return sum(1 for _ in self.directory.glob(f"{_LISTENS}*"))

    def restart(self) -> None:
        """Say that the workers are about to be ended, to be started anew; for the agent."""
        self._write(_RESTARTING, b"")

    def restarting(self) -> bool:
        """Say whether the agent ends the workers to start them anew: then its SIGTERM is no preemption."""
        return (self.directory / _RESTARTING).exists()

    def tell_store(self, *, answers: bool) -> None:
        """Say whether the store of the rounds answers; for the agent."""
        if answers:
            (self.directory / _AWAY).unlink(missing_ok=True)
        else:
            self._write(_AWAY, b"")

    def store_away(self) -> bool:
        """Say whether the agent cannot restart anything, as the store of the rounds does not answer."""
        return (self.directory / _AWAY).exists()

    def name_job(self, job: str) -> None:
        """Say which start of the job this is; for the agent."""
        self._write(_JOB, job.encode())

    def job(self) -> str | None:
        """Return what names this start of the job on all its nodes and in all its restarts; None if nobody has said."""
        try:
            return (self.directory / _JOB).read_text()
        except FileNotFoundError:
            return None

    def keep(self, name: str, content: bytes) -> bytes:
        """Return what was kept first under this name in this start of the job: ``content``, if nothing was."""
        kept = self.directory / f"{_KEPT}{self.job() or ''}-{name}"
        partial = self.directory / f".{kept.name}.{os.getpid()}"
        partial.write_bytes(content)
        try:
            kept.hardlink_to(partial)  # whole, or not at all
        except FileExistsError:
            return kept.read_bytes()
        else:
            return content
        finally:
            partial.unlink()

    def clear(self) -> None:
        """Forget what was said, but not the name of the job and what is kept for it.

        For an agent that is about to start its workers.
        """
        said = (
            path
            for kind in (_ASKED, _RESTARTING, _AWAY, f"{_PARKED}*", f"{_LISTENS}*")
            for path in self.directory.glob(kind)
        )
        for path in said:
            path.unlink(missing_ok=True)
        self._looked = False

    def _write(self, name: str, content: bytes) -> None:
        # The file of another process that writes the same name must not be the one that is renamed; the name must not
        # look like a finished one either.
        partial = self.directory / f".{name}.{os.getpid()}"
        partial.write_bytes(content)
        partial.replace(self.directory / name)
