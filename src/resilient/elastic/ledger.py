"""Where the rounds of a job lie in the store, and how they are read: a listing proposes, exact names decide."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from typing import Final, Self, TypeVar
from urllib.parse import quote

import msgspec

from resilient.catalog.once import create_once, exists, read_or_none
from resilient.catalog.parallel import each as of_each
from resilient.elastic.documents import Agent, Closed, Done, Ended, Lost, Reach, decode, encode
from resilient.format.layout import CONTROL
from resilient.store.base import Store

D = TypeVar("D", bound=msgspec.Struct)

_ROUND: Final = re.compile(r"\d{8}")
_KEPT: Final = frozenset({"closed", "ended"})
_ONCE: Final = frozenset({"join", "wait", "lost", "closed"})


class Ledger:
    """The rounds of one job. What is created once is read once."""

    def __init__(self, store: Store, rdzv_id: str) -> None:
        # An id is free text; a component of a key is not.
        self._prefix = f"{CONTROL}rounds/{quote(rdzv_id, safe='')}/".replace("/./", "/%2E/").replace("/../", "/%2E%2E/")
        self.store = store
        self._known: dict[str, msgspec.Struct] = {}

    def through(self, store: Store) -> Self:
        """Return the same rounds as seen through another view of the store; what one has read the other knows."""
        other = copy(self)
        other.store = store
        return other

    def newest_closed(self, after: int = 0) -> Closed | None:
        """Return the newest round that is closed, at or after ``after``; None if there is none.

        Rounds are closed one after another and stay, so that walking up by exact names finds what a listing missed.
        """
        proposed = (
            [int(name) for name in self.store.folders(self._prefix) if _ROUND.fullmatch(name)] if not after else []
        )
        number = max([after, *proposed])
        newest = None
        while number > 0 and (newest := self.closed(number)) is None and number > after:
            number -= 1  # the newest one that was proposed may still be open, or its last word torn
        while (found := self.closed(number + 1)) is not None:
            newest, number = found, number + 1
        return newest

    def closed(self, number: int) -> Closed | None:
        return self._read(Closed, number, "closed")

    def close(self, closed: Closed) -> Closed | None:
        """Close a round unless it is closed; return what holds now (None: something that does not parse)."""
        create_once(self.store, self._key(closed.round, "closed"), encode(closed))
        return self.closed(closed.round)

    def names(self, number: int) -> set[str]:
        """Return what a listing shows of a round, such as ``join/<nonce>``: proposals."""
        prefix = f"{self._prefix}{number:08d}/"
        return {key.removeprefix(prefix) for key in self.store.list(prefix)}

    def agents(self, number: int, folder: str, names: Iterable[str]) -> dict[str, Agent]:
        """Return the agents that join (``join``) or wait (``wait``), of those that ``names`` proposes."""
        return self._all(Agent, number, folder, names)

    def lost(self, number: int, names: Iterable[str]) -> dict[str, Lost]:
        return self._all(Lost, number, "lost", names)

    def reaches(self, number: int, nonces: Iterable[str]) -> dict[str, Reach]:
        return self._all(Reach, number, "reach", [f"reach/{nonce}" for nonce in nonces])

    def join(self, number: int, agent: Agent) -> None:
        self._create(number, f"join/{agent.nonce}", agent)

    def wait(self, number: int, agent: Agent) -> None:
        self._create(number, f"wait/{agent.nonce}", agent)

    def declare_lost(self, number: int, lost: Lost) -> bool:
        """Say that a member is lost; return whether it was this call that said it first."""
        return create_once(self.store, self._key(number, f"lost/{lost.nonce}"), encode(lost))

    def write_reach(self, number: int, reach: Reach) -> None:
        self.store.put(self._key(number, f"reach/{reach.nonce}"), [encode(reach)])

    def write_done(self, number: int, done: Done) -> None:
        self._create(number, f"done/{done.nonce}", done)

    def is_done(self, number: int, nonce: str) -> bool:
        return exists(self.store, self._key(number, f"done/{nonce}"))

    def write_ended(self, number: int, ended: Ended) -> None:
        self._create(number, "ended", ended)

    def has_ended(self, number: int) -> bool:
        return exists(self.store, self._key(number, "ended"))

    def clear(self, number: int) -> None:
        """Remove what lies in a round that is long over, but for what rounds are walked by."""
        names = sorted(name for name in self.names(number) if name not in _KEPT)
        of_each(lambda name: self.store.delete(self._key(number, name)), names)

    def _all(self, kind: type[D], number: int, folder: str, names: Iterable[str]) -> dict[str, D]:
        wanted = in_folder(folder, names)
        # Side by side: one after another, those of a thousand nodes take a minute of an object store's round trips.
        found = of_each(lambda name: self._read(kind, number, name), wanted)
        return {
            name.removeprefix(f"{folder}/"): each for name, each in zip(wanted, found, strict=True) if each is not None
        }

    def _read(self, kind: type[D], number: int, name: str) -> D | None:
        key = self._key(number, name)
        known = self._known.get(key)
        if isinstance(known, kind):
            return known
        data = read_or_none(self.store, key)
        found = None if data is None else decode(kind, data, key)
        if found is not None and name.partition("/")[0] in _ONCE:
            self._known[key] = found
        return found

    def _create(self, number: int, name: str, document: msgspec.Struct) -> None:
        create_once(self.store, self._key(number, name), encode(document))

    def _key(self, number: int, name: str) -> str:
        return f"{self._prefix}{number:08d}/{name}"


def in_folder(folder: str, names: Iterable[str]) -> list[str]:
    """Return the names in one folder of a round."""
    return sorted(name for name in names if name.startswith(f"{folder}/"))
