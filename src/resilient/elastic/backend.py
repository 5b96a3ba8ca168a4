"""The entry point of torchrun's rendezvous backend ``resilient``.

Apart from the handler, because torch loads it while it is being imported itself, and in every program that imports
``torch.distributed.elastic``: nothing heavy is imported before the backend is really used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """Return what makes a handler: the entry point ``resilient`` of the group ``torchrun.handlers``."""
    return create


def create(parameters: Any) -> Any:
    """Return the handler for the arguments of torchrun."""
    from resilient.elastic.handler import create as create_handler  # noqa: PLC0415 -- see above

    return create_handler(parameters)
