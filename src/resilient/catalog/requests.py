"""What people ask of a running job through the place where its checkpoints are: to stop, or to change its size.

Requests are numbered and created if absent, as claims are. Nobody deletes or changes one; a life of the run looks for
those that are newer than the newest at its start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from resilient.catalog import process
from resilient.catalog.generations import newest_claim
from resilient.catalog.once import create_once, exists, read_or_none
from resilient.clock import Clock, rfc3339
from resilient.errors import CorruptError
from resilient.format import layout
from resilient.format.frame import seal_json, unseal_json
from resilient.store.base import Store

Kind = Literal["stop", "resize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``kind``: "stop", or "resize" to so many ``nodes``. ``launch``: of the newest claim at that time; "" if none."""

    kind: Kind
    nodes: int | None
    launch: str
    why: str
    created: str
    nonce: str

    def is_for(self, launch: str) -> bool:
        """Say whether it was asked of that launch, so that a life which the launch starts again has to heed it, too."""
        return self.launch == launch


def ask(store: Store, kind: Kind, *, nodes: int | None = None, why: str, clock: Clock) -> Request:
    """Ask something of whoever trains here."""
    claim = newest_claim(store)
    request = Request(
        kind=kind,
        nodes=nodes,
        launch=claim.launch if claim is not None else "",
        why=why,
        created=rfc3339(clock.now()),
        nonce=process.nonce(),
    )
    number = _newest_number(store) + 1
    while not create_once(store, layout.request(number), _encode(request)):
        number += 1
    return request


def newest_request(store: Store) -> tuple[int, Request | None]:
    """Return the newest request and its number; (0, None) if there is none, None for one that cannot be read."""
    number = _newest_number(store)
    return number, _read(store, number) if number else None


class RequestWatch:
    """Sees requests that come after number ``after``, one by one; costs one look per poll."""

    def __init__(self, store: Store, after: int) -> None:
        self.number = after
        self._store = store

    def poll(self) -> Request | None:
        """Return the next request, if there is one; one that cannot be read is passed over.

        Raises:
            StoreError: the store does not answer.
        """
        while exists(self._store, layout.request(self.number + 1)):
            self.number += 1
            request = _read(self._store, self.number)
            if request is not None:
                return request
        return None


def _newest_number(store: Store) -> int:
    """Return the number of the newest request; the listing may be stale, so the names after it are tried too."""
    numbers = (layout.parse_request(key) for key in store.list(layout.REQUESTS))
    newest = max((number for number in numbers if number is not None), default=0)
    while exists(store, layout.request(newest + 1)):
        newest += 1
    return newest


def _encode(request: Request) -> bytes:
    return seal_json(asdict(request))


def _read(store: Store, number: int) -> Request | None:
    key = layout.request(number)
    data = read_or_none(store, key)
    if data is None:
        return None
    try:
        members: dict[str, Any] = unseal_json(data, key)
        members.pop("format")
        return msgspec.convert(members, Request)
    except (CorruptError, msgspec.ValidationError):
        return None
