"""Ranks as threads of one process, each with a `Saver` of its own: the real protocol, without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saver import Saver
from resilient.events import Bus, Event
from resilient.format.documents import Claim, Commit
from resilient.store.base import Store


class SharedValues:
    """A key-value store for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)


def on_ranks(size: int, work: Callable[[Peers], object]) -> list[object]:
    """Run ``work`` on threads that are ranks; return results or errors, by rank."""
    values = SharedValues()

    def one(rank: int) -> object:
        try:
            return work(Peers(rank, size, values))
        except Exception as error:  # noqa: BLE001 -- boundary: the test looks at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@dataclass
class Rank:
    """One rank: its peers, its saver, and the events that it reported."""

    peers: Peers
    saver: Saver
    events: list[Event] = field(default_factory=list)


def make_ranks(
    store: Store, size: int, settings: SaveSettings | None = None, continues: Commit | None = None
) -> list[Rank]:
    """Return the ranks of a new generation."""
    open_run(store, create=True, clock=SYSTEM_CLOCK)
    claim: Claim = claim_generation(store, world_size=size, launch="0" * 32, heartbeat=False)
    write_base(store, claim, continues)
    values = SharedValues()
    ranks = []
    for rank in range(size):
        bus = Bus()
        peers = Peers(rank, size, values)
        made = Rank(peers=peers, saver=Saver(store, claim, peers, settings or SaveSettings(), run_id="0" * 16, bus=bus))
        bus.subscribe(made.events.append)
        ranks.append(made)
    return ranks
