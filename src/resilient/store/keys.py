"""Which keys an object may have."""

from __future__ import annotations

from resilient.errors import ErrorKind, UsageError


def checked_key(key: str) -> str:
    """Return ``key`` if it names an object inside the place on every kind of store; raise `UsageError` otherwise.

    A key is one or more components with ``/`` between them. Components that a file system gives a meaning (empty,
    ``.``, ``..``) are refused, so that no key read from a foreign document can reach outside the place.
    """
    if "\0" in key or any(component in {"", ".", ".."} for component in key.split("/")):
        raise UsageError(f"{key!r} cannot be the key of an object", kind=ErrorKind.INVALID_ARGUMENT)
    return key


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is empty, or a key with ``/`` after it; raise `UsageError` otherwise."""
    if prefix:
        checked_key(prefix.removesuffix("/"))
        if not prefix.endswith("/"):
            raise UsageError(f"prefix {prefix!r} does not end in '/'", kind=ErrorKind.INVALID_ARGUMENT)
    return prefix
