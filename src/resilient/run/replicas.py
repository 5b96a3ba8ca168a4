"""Which of a run's items are compared between the ranks that hold them, while it goes on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from resilient.clock import Clock
from resilient.config import Settings
from resilient.engine.replica_watch import ReplicaWatch
from resilient.events import Bus
from resilient.run.opening import Opened
from resilient.state.items import declared, unwrapped
from resilient.state.wrappers import PerRank


def compared(
    items: Mapping[str, object], opened: Opened, settings: Settings, *, bus: Bus, clock: Clock
) -> ReplicaWatch:
    """Return what compares the parameters of the modules among these items."""
    modules = {
        name: inner
        for name, item in items.items()
        if isinstance(inner := unwrapped(item), nn.Module) and not declared(item, PerRank)
    }
    topic = f"replicas/{opened.claim.generation}-{opened.claim.nonce}"
    return ReplicaWatch(modules, opened.peers, every=settings.compare_replicas, topic=topic, bus=bus, clock=clock)
