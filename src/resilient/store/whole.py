"""What stores that know nothing but whole objects make of them: ranges, and folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilient.errors import CorruptError, ErrorKind


def copy_range(content: bytes, start: int, into: memoryview, *, key: str, url: str) -> None:
    """Fill ``into`` with the bytes of an object from ``start`` on.

    Raises:
        CorruptError: kind ``malformed``: the object, which ``key`` and ``url`` name, is too short.
    """
    view = into.cast("B")
    end = start + view.nbytes
    if end > len(content):
        raise CorruptError(
            f"object {key!r} in {url} ends at byte {len(content)}; bytes {start} to {end} are wanted",
            kind=ErrorKind.MALFORMED,
        )
    view[:] = memoryview(content)[start:end]


def folders_of(keys: Iterable[str], prefix: str) -> Iterator[str]:
    """Return the next component of all keys that have another ``/`` after ``prefix``, which all begin with."""
    below = (key.removeprefix(prefix) for key in keys)
    return iter({rest.partition("/")[0] for rest in below if "/" in rest})
