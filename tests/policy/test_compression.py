"""Compression is chosen exactly where it makes a save durable sooner."""

from __future__ import annotations

import pytest

from resilient.errors import UsageError
from resilient.policy.compression import AUTO_LEVEL, GAIN, Compress, Trial, choose_level, parse_compress

AUTO = Compress(mode="auto")
BF16 = Trial(ratio=1.47, bytes_per_s=400e6)
MB = 1e6


def test_what_is_asked_for_is_understood() -> None:
    assert parse_compress("auto") == AUTO
    assert parse_compress("off") == Compress(mode="off")
    assert parse_compress("zstd:9") == Compress(mode="zstd", level=9)


@pytest.mark.parametrize(
    "compress", ["", "zstd", "zstd:", "zstd:0", "zstd:23", "zstd:-1", "lz4", "AUTO", None, True, 3]
)
def test_anything_else_is_refused_with_what_it_may_be(compress: object) -> None:
    with pytest.raises(UsageError, match="zstd:N"):
        parse_compress(compress)  # type: ignore[arg-type]


def test_a_store_slower_than_the_codec_is_sent_compressed_and_a_local_disk_is_not() -> None:
    assert choose_level(AUTO, store_bytes_per_s=50 * MB, trial=BF16, cores=1) == AUTO_LEVEL
    assert choose_level(AUTO, store_bytes_per_s=1500 * MB, trial=BF16, cores=1) is None


def test_an_encoder_that_is_the_bottleneck_pays_only_with_more_cores() -> None:
    slow = Trial(ratio=1.47, bytes_per_s=100e6)
    assert choose_level(AUTO, store_bytes_per_s=200 * MB, trial=slow, cores=1) is None
    assert choose_level(AUTO, store_bytes_per_s=200 * MB, trial=slow, cores=3) == AUTO_LEVEL


def test_a_gain_too_small_for_its_processor_time_is_left() -> None:
    for ratio, chosen in ((GAIN - 0.01, None), (GAIN + 0.01, AUTO_LEVEL)):
        trial = Trial(ratio=ratio, bytes_per_s=400e6)
        assert choose_level(AUTO, store_bytes_per_s=MB, trial=trial, cores=1) == chosen


def test_nothing_is_guessed() -> None:
    assert choose_level(AUTO, store_bytes_per_s=None, trial=BF16, cores=2) is None
    assert choose_level(AUTO, store_bytes_per_s=MB, trial=None, cores=2) is None


def test_what_was_asked_for_is_done_whatever_was_measured() -> None:
    assert choose_level(Compress(mode="off"), store_bytes_per_s=MB, trial=BF16, cores=2) is None
    assert choose_level(Compress(mode="zstd", level=4), store_bytes_per_s=9e9, trial=BF16, cores=1) == 4
