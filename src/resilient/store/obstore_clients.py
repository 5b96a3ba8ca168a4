"""What the obstore clients of all clouds have in common: time-outs, retries, and the options that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore.store import ObjectStoreMethods

from resilient.errors import ErrorKind, UsageError
from resilient.store.retrying import TIMEOUT_S

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

REQUEST_TIMEOUT: Final = timedelta(seconds=90)
"""A request takes no longer, whatever happens: half of a link of 3 Mbit/s would still make it."""

_CONNECT_TIMEOUT: Final = timedelta(seconds=5)
_RETRY_TIMEOUT: Final = timedelta(seconds=TIMEOUT_S)
_MOST_RETRIES: Final = 1_000  # the time is what bounds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Two clients of one place.

    ``once`` tries a request once: retries are for one layer, which knows the deadline. ``again`` repeats one that got
    lost for at most as long as that layer would: only the client itself can send one part of many again.
    """

    once: ObjectStoreMethods
    again: ObjectStoreMethods


def clients(make: Callable[[RetryConfig], ObjectStoreMethods]) -> Clients:
    """Return both clients, as ``make`` makes them for a rule of retries."""
    return Clients(
        once=make({"max_retries": 0, "retry_timeout": _RETRY_TIMEOUT}),
        again=make({"max_retries": _MOST_RETRIES, "retry_timeout": _RETRY_TIMEOUT}),
    )


def network() -> ClientConfig:
    """Return how connections are made. An endpoint says itself whether it is encrypted; those of the clouds are."""
    return {"allow_http": True, "timeout": REQUEST_TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}


def unknown_option(name: str) -> UsageError:
    """Return the error for a storage option that obstore has no like of."""
    return UsageError(
        f"the storage option {name!r} is unknown to obstore",
        kind=ErrorKind.INVALID_ARGUMENT,
        hint='add {"client": "fsspec"} to the storage options',
    )
