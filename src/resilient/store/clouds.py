"""Which client reaches a URL that is not of this machine: obstore for the three clouds, fsspec for all others."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

from resilient.clock import Clock
from resilient.errors import ErrorKind, UsageError
from resilient.store.base import Store

CLOUDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "az"),
}
"""The schemes of the clouds, and the one that each is shown as."""

_CLIENTS: Final = {"s3": "aws", "gs": "google", "az": "azure"}
_OWN_SCHEMES: Final = ("file", "local", "memory", *CLOUDS)


def open_bucket(scheme: str, rest: str, options: Mapping[str, Any], clock: Clock) -> Store:
    """Return the store at ``scheme://rest``; raise `UsageError`.

    It is reached through obstore, or through fsspec if the option ``client`` says so, or if there are options that
    obstore has no like of, which is told.
    """
    bucket, _, prefix = rest.partition("/")
    prefix, options = prefix.strip("/"), dict(options)
    client = options.pop("client", None)
    if client not in {None, "obstore", "fsspec"}:
        message = f"the storage option 'client' is 'obstore' or 'fsspec', not {client!r}"
        raise UsageError(message, kind=ErrorKind.INVALID_ARGUMENT)
    if CLOUDS[scheme] == "az" and "@" in bucket:  # container@account.dfs.core.windows.net
        bucket, _, host = bucket.partition("@")
        options.setdefault("account_name", host.partition(".")[0])
    if not bucket or "@" in bucket:
        raise UsageError(
            f"{scheme}:// wants a bucket and nothing else before the first slash, got {bucket.rpartition('@')[2]!r}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"write {scheme}://bucket/prefix; credentials belong in the environment or in storage_options",
        )

    def with_fsspec() -> Store:
        return _bucket_with_fsspec(scheme, bucket, prefix, options, clock)

    if client == "fsspec":
        return with_fsspec()
    try:
        store = _bucket_with_obstore(CLOUDS[scheme], bucket, prefix, options, clock)
    except UsageError as error:
        if client == "obstore":
            raise
        warnings.warn(f"{scheme}://{bucket} goes through fsspec, which is slower: {error}", stacklevel=4)
        return with_fsspec()
    fork_safe: Store = _module("fork_safe").ForkSafe(store, with_fsspec)
    return fork_safe


def open_with_fsspec(url: str, options: Mapping[str, Any], clock: Clock) -> Store:
    """Return the store at a URL that fsspec knows; raise `UsageError`."""
    scheme = url.partition(":")[0].lower()
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
    store = _module("fsspec_store")
    advice = registry.known_implementations.get(scheme, {}).get("err", "")
    try:
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(url, **store.FRESH, **options)
    except ImportError as error:
        raise _missing(scheme, str(error) or advice) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{_shown(url)!r} cannot be opened: {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
    opened: Store = store.FsspecStore(filesystem, path, url=_shown(url), clock=clock)
    return opened


def _bucket_with_obstore(cloud: str, bucket: str, prefix: str, options: Mapping[str, Any], clock: Clock) -> Store:
    connect = _module(_CLIENTS[cloud]).connect(bucket, prefix, options)
    url = f"{cloud}://{bucket}/{prefix}".rstrip("/")
    store: Store = _module("object_store").ObjectStore(url, connect, clock=clock)
    return store


def _bucket_with_fsspec(scheme: str, bucket: str, prefix: str, options: Mapping[str, Any], clock: Clock) -> Store:
    if CLOUDS[scheme] != "s3":
        return open_with_fsspec(f"{scheme}://{bucket}/{prefix}", options, clock)
    try:
        store: Store = _module("s3").connect(bucket, prefix, options, clock=clock)
    except ImportError as error:
        raise _missing(scheme, f"s3fs is not installed ({error})") from error
    except (KeyError, TypeError, ValueError) as error:
        message = f"s3://{bucket}/{prefix} cannot be opened: {error}"
        raise UsageError(message, kind=ErrorKind.INVALID_ARGUMENT) from error
    return store


def _module(name: str) -> ModuleType:
    # Imported when wanted: a run in a local directory should not pay for clients of clouds.
    return importlib.import_module(f"resilient.store.{name}")


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
