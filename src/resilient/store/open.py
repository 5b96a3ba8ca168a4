"""Which store a URL, a path or an object stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ErrorKind, UsageError
from resilient.store.base import Store
from resilient.store.clouds import CLOUDS, open_bucket, open_with_fsspec
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore, shared_memory_store
from resilient.store.recipe import Recipe, described
from resilient.store.retrying import Retrying

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)


def open_store(
    place: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Retrying:
    """Return the store at ``place``, with retries around it.

    This reaches no network and makes nothing; whether the place works is for `resilient.store.probe`.

    ``place`` is a path, ``file://``, ``memory://name`` (one place per name and process), ``s3://bucket/prefix``,
    ``gs://bucket/prefix``, ``az://container/prefix``, any other URL that fsspec knows, or a `Store`.

    ``storage_options`` are those of the fsspec filesystem for that URL (s3fs, gcsfs, adlfs); what they leave open
    (credentials, endpoint, profile) comes from where the tools of that cloud look, for S3 the AWS environment and
    configuration files. The three clouds are reached through obstore; through the fsspec filesystem if there are
    options that only it understands, or if ``{"client": "fsspec"}`` is among them. Raises `UsageError`.
    """
    if isinstance(place, Retrying):
        return place
    if isinstance(place, (str, os.PathLike)):
        url, options = os.fspath(place), dict(storage_options or {})
        store = _from_url(url, options, clock)
        return Retrying(store, clock=clock, recipe=_of_directory(store) or _of_url(store, url, options))
    if isinstance(place, Store):
        return Retrying(place, clock=clock, recipe=_of_directory(place))
    raise UsageError(
        f"a place is a URL, a path or a Store, not {type(place).__name__}", kind=ErrorKind.INVALID_ARGUMENT
    )


def recipe(store: Store) -> Recipe | None:
    """Return how another process opens the same store; None if it cannot, as with ``memory://`` and `Store` objects.

    What was opened from a URL or a path has one, unless its options are no plain values.
    """
    return store.recipe if isinstance(store, Retrying) else None


def _of_directory(store: Store) -> Recipe | None:
    # Its absolute path, whatever the working directory of the other process is; what is derived from it may be special.
    return described(store.url, {}) if type(store) is LocalStore else None


def _of_url(store: Store, url: str, options: Mapping[str, Any]) -> Recipe | None:
    return None if isinstance(store, MemoryStore) else described(url, options)


def _from_url(url: str, options: dict[str, Any], clock: Clock) -> Store:
    found = _URL.fullmatch(url)
    if found is None:
        if not url.strip():
            raise UsageError(
                "the place of the run is empty",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="give a directory or a URL such as s3://bucket/run",
            )
        return _without_options(LocalStore(url), options)
    scheme, slash, rest = found[1].lower(), found[2], found[3]
    if not slash:
        hint = f"write {scheme}://{rest}, or ./{url} for a directory of that name"
        raise UsageError(f"{url!r} is neither a URL nor a usual path", kind=ErrorKind.UNKNOWN_SCHEME, hint=hint)
    match scheme:
        case "file" | "local":
            return _without_options(LocalStore(_path_of(url, rest)), options)
        case "memory":
            return _without_options(shared_memory_store(rest.strip("/")), options)
        case _ if scheme in CLOUDS:
            return open_bucket(scheme, rest, options, clock)
        case _:
            return open_with_fsspec(url, options, clock)


def _path_of(url: str, rest: str) -> Path:
    host, _, path = rest.partition("/")
    if host not in {"", "localhost"}:
        raise UsageError(
            f"{url!r} names the host {host!r}, not a directory of this machine",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"write file:///{rest} for an absolute path, or {rest} for a relative one",
        )
    return Path("/" + unquote(path))


def _without_options(store: Store, options: Mapping[str, Any]) -> Store:
    if options:
        raise UsageError(
            f"{store.url} takes no storage options, got {', '.join(sorted(options))}", kind=ErrorKind.INVALID_ARGUMENT
        )
    return store
