"""Numbers of bytes are told in the unit that suits them."""

from __future__ import annotations

import pytest

from resilient.format.sizes import in_words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 61, "2048.0 PiB"),
    ],
)
def test_a_size_in_words(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words
