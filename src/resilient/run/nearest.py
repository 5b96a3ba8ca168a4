"""What a start makes of the tiers: the newest state in them is finished, and a restore reads what it can from them."""

from __future__ import annotations

from collections import Counter

import msgspec

from resilient.clock import Clock
from resilient.config import Settings, parse_bandwidth
from resilient.engine.restore import RestoredFrom
from resilient.engine.tiers.finishing import Finishing
from resilient.errors import StoreError
from resilient.events import Bus, Notice, RestoredFromTiers
from resilient.run.opening import Opened
from resilient.store.base import Store
from resilient.store.nearest import NearestStore, Shards
from resilient.writer.tiering import forget, open_tier


class Nearest:
    """The tiers of this node at the start of one life, beside the store of the run; without tiers, the store alone."""

    def __init__(self, opened: Opened, settings: Settings, *, bus: Bus, clock: Clock) -> None:
        self._opened = opened
        self._settings = settings
        self._bus = bus
        self._clock = clock
        stores = [(tier.name, open_tier(tier)) for tier in opened.tiers.all]
        self._tiers = [(store, Shards(name, store, notice=self._notice)) for name, store in stores]
        self._nearest = NearestStore(opened.store, [shards for _, shards in self._tiers]) if opened.tiers.own else None

    @property
    def store(self) -> Store:
        """What to restore from."""
        return self._nearest or self._opened.store

    def finish(self) -> None:
        """Commit the newest state that is complete over all nodes, if it is newer than what is committed."""
        opened, settings = self._opened, self._settings
        if self._nearest is None:
            return
        finishing = Finishing(
            opened.store,
            self._tiers,
            opened.peers,
            generation=opened.claim.generation,
            max_bandwidth=None if settings.max_bandwidth is None else parse_bandwidth(settings.max_bandwidth),
            timeout_s=settings.restore_timeout_s,
            bus=self._bus,
            clock=self._clock,
        )
        finishing.finish(opened.run_id)

    def tell(self, restored: RestoredFrom | None) -> None:
        """Say what came from where, and let go of what dead nodes have left here; when all ranks have restored."""
        if self._nearest is None:
            return
        peers, served = self._opened.peers, self._nearest.served
        mine: Counter[str] = Counter()
        for (_, source), nbytes in served.items():
            mine[source] += nbytes
        topic = peers.numbered("sources")
        answers = peers.gather(topic, msgspec.msgpack.encode(dict(mine)), self._settings.restore_timeout_s)
        if restored is not None:
            total: Counter[str] = Counter()
            for answer in answers:
                total.update(msgspec.msgpack.decode(answer, type=dict[str, int]))
            event = RestoredFromTiers(
                rank=peers.rank,
                step=restored.commit.step,
                sources=tuple(total.most_common()),
                shards=tuple((key, source, nbytes) for (key, source), nbytes in sorted(served.items())),
            )
            self._bus.emit(event)
        self._opened.tiers.remove_left()
        self._forget(restored)

    def _forget(self, restored: RestoredFrom | None) -> None:
        """Let go of what lives before have left in this node's own tiers, which have room for two states.

        But for the one that was restored, which is in the store as well, and is read sooner here.
        """
        opened = self._opened
        kept = None if restored is None else restored.commit.attempt
        before = opened.claim.generation
        for store, shards in self._tiers[: len(opened.tiers.own)]:
            try:
                forget(store, lambda attempt: attempt.generation < before and attempt != kept)
            except StoreError as error:
                self._notice(f"old states stay in the tier {shards.name}: {error}")

    def _notice(self, message: str) -> None:
        self._bus.emit(Notice(rank=self._opened.peers.rank, message=message))
