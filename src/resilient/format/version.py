"""Which format this is, and which ones this library reads.

The library's major version is the format's major version; a reader refuses a newer major by name.
"""

from __future__ import annotations

from typing import Final

from resilient.errors import CorruptError, ErrorKind

FORMAT: Final = 1


def check_format(found: int, where: str) -> None:
    """Raise `CorruptError` if ``where`` was written by a newer format than this library reads."""
    if found > FORMAT:
        raise CorruptError(
            f"{where} was written in format {found}; this version of resilient reads up to format {FORMAT}",
            kind=ErrorKind.NEWER_FORMAT,
            hint=f"upgrade resilient-torch to version {found} or newer",
        )
