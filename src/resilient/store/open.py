"""Which store a URL, a path or an object stands for."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ErrorKind, UsageError
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.store.memory import shared_memory_store
from resilient.store.retrying import Retrying

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)
_OWN_SCHEMES = ("file", "local", "memory", "s3")


def open_store(
    place: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Retrying:
    """Return the store at ``place``, with retries around it.

    This reaches no network and makes nothing; whether the place works is for `resilient.store.probe`.

    ``place`` is a path, ``file://``, ``memory://name`` (one place per name and process), ``s3://bucket/prefix``, any
    other URL that fsspec knows, or a `Store`. ``storage_options`` go to the client library; what they leave open
    (credentials, endpoint, profile) comes from where that library looks, for S3 the AWS environment and configuration
    files. Raises `UsageError`.
    """
    if isinstance(place, Retrying):
        return place
    if isinstance(place, (str, os.PathLike)):
        return Retrying(_from_url(os.fspath(place), dict(storage_options or {}), clock), clock=clock)
    if isinstance(place, Store):
        return Retrying(place, clock=clock)
    raise UsageError(
        f"a place is a URL, a path or a Store, not {type(place).__name__}", kind=ErrorKind.INVALID_ARGUMENT
    )


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
        case "s3" | "s3a":
            return _s3(rest, options, clock)
        case _:
            return _fsspec(scheme, url, options, clock)


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


def _s3(rest: str, options: dict[str, Any], clock: Clock) -> Store:
    bucket, _, prefix = rest.partition("/")
    if not bucket or "@" in bucket:
        raise UsageError(
            f"s3:// wants a bucket and nothing else before the first slash, got {bucket.rpartition('@')[2]!r}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="write s3://bucket/prefix; credentials belong in the AWS environment or in storage_options",
        )
    # Imported when wanted: a run in a local directory should not pay for a client of S3.
    s3 = _import("resilient.store.s3", "s3", "s3fs is not installed")
    try:
        store: Store = s3.connect(bucket, prefix.strip("/"), options, clock=clock)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"s3://{rest} cannot be opened: {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
    return store


def _fsspec(scheme: str, url: str, options: dict[str, Any], clock: Clock) -> Store:
    registry = importlib.import_module("fsspec.registry")
    known = {*registry.known_implementations, *registry.registry}
    if scheme not in known:
        near = difflib.get_close_matches(scheme, sorted({*known, *_OWN_SCHEMES}), n=3, cutoff=0.5)
        advice = (
            f"did you mean {' or '.join(f'{each}://' for each in near)}?"
            if near
            else "a path, s3://, gs:// and az:// are usual"
        )
        raise UsageError(f"unknown scheme {scheme}:// in {_shown(url)!r}", kind=ErrorKind.UNKNOWN_SCHEME, hint=advice)
    store = importlib.import_module("resilient.store.fsspec_store")
    advice = registry.known_implementations.get(scheme, {}).get("err", "")
    try:
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(url, **store.FRESH, **options)
    except ImportError as error:
        raise _missing(scheme, str(error) or advice) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{_shown(url)!r} cannot be opened: {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
    opened: Store = store.FsspecStore(filesystem, path, url=_shown(url), clock=clock)
    return opened


def _import(module: str, scheme: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(scheme, f"{why} ({error})") from error


def _missing(scheme: str, why: str) -> UsageError:
    return UsageError(
        f"{scheme}:// needs a package that is missing here: {why}",
        kind=ErrorKind.MISSING_EXTRA,
        hint="install that package next to this one",
    )


def _shown(url: str) -> str:
    """Return a URL without user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else url
