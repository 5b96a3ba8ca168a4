"""Fault tolerance for PyTorch training.

These names are the whole promised surface. They load at first use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient.engine.api import checkpoints, load, save
    from resilient.engine.checkpoint import Checkpoint
    from resilient.engine.handle import SaveHandle
    from resilient.errors import ResilientError
    from resilient.policy.interval import SaveWhen
    from resilient.policy.keep import Keep
    from resilient.run.decorator import train
    from resilient.run.restored import Restored
    from resilient.run.sampler import ElasticSampler
    from resilient.run.session import Run
    from resilient.state.wrappers import AfterStep, PerRank, Shard
    from resilient.store.base import Store

    __version__: str

_HOME = {
    "AfterStep": "resilient.state.wrappers",
    "Checkpoint": "resilient.engine.checkpoint",
    "ElasticSampler": "resilient.run.sampler",
    "Keep": "resilient.policy.keep",
    "PerRank": "resilient.state.wrappers",
    "ResilientError": "resilient.errors",
    "Restored": "resilient.run.restored",
    "Run": "resilient.run.session",
    "SaveHandle": "resilient.engine.handle",
    "SaveWhen": "resilient.policy.interval",
    "Shard": "resilient.state.wrappers",
    "Store": "resilient.store.base",
    "checkpoints": "resilient.engine.api",
    "load": "resilient.engine.api",
    "save": "resilient.engine.api",
    "train": "resilient.run.decorator",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("resilient-torch")
    if name not in _HOME:
        raise AttributeError(f"module 'resilient' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "AfterStep", "Checkpoint", "ElasticSampler", "Keep", "PerRank", "ResilientError", "Restored", "Run", "SaveHandle",
    "SaveWhen", "Shard", "Store", "checkpoints", "load", "save", "train",
]  # fmt: skip
