"""Where the rounds of a job are kept, from what torchrun was given as its endpoint."""

from __future__ import annotations

import re
from typing import Final

from resilient.clock import Clock
from resilient.config import read_settings
from resilient.elastic.key_value_place import KeyValuePlace, serve
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.store.open import open_store
from resilient.store.probe import probe
from resilient.store.retrying import Retrying

_HOST_AND_PORT: Final = re.compile(r"(?:c10d://)?(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
_SCHEME: Final = "c10d://"


def open_endpoint(endpoint: str, *, is_host: bool, timeout_s: float, clock: Clock) -> Retrying:
    """Return the store of the rounds: a place that all nodes share, or a key-value server at ``HOST:PORT``.

    The server is started here if the host is this machine (or ``is_host`` says so) and nobody serves there yet; any
    other node waits for it, ``timeout_s`` at most.

    Raises:
        UsageError: there is no endpoint.
        StoreError: it cannot be reached, or does not tell who creates an object first.
    """
    if not endpoint:
        raise UsageError(
            "the rendezvous needs a place that all nodes share",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="give the place of the run: --rdzv-endpoint=s3://bucket/run, or a directory on a shared file system",
        )
    found = _HOST_AND_PORT.fullmatch(endpoint)
    if found is not None or endpoint.startswith(_SCHEME):
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise UsageError(
                f"{endpoint!r} has no port from 1 to 65535",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="write HOST:PORT, such as node0:29400, the same on all nodes",
            )
        host, port = found["host"].strip("[]"), int(found["port"])
        server = serve(host, port, is_host=is_host)
        store = open_store(KeyValuePlace(host, port, server=server, timeout_s=timeout_s, clock=clock))
    else:
        store = open_store(endpoint, storage_options=read_settings().storage_options)
    probe(store)
    if not store.capabilities.conditional_create:
        raise StoreError(
            f"{store.url} does not tell who of several creates an object first, which rounds are decided by",
            kind=ErrorKind.UNTRUSTWORTHY_STORE,
            hint=f"run `resilient doctor {store.url}`; the rendezvous may also use another place than the run",
        )
    return store
