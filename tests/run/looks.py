"""Stand-ins for what a run was opened with, as far as those that only look at it need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient.config import Settings, read_settings
from resilient.engine.peers import Peers
from resilient.store.base import Store


@dataclass
class Opened:
    store: Store
    peers: Peers = field(default_factory=Peers.current)


def settings_with(**values: Any) -> Settings:
    return read_settings(values, environ={})
