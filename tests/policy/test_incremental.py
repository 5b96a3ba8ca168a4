"""Unchanged chunks are found, and bytes are written anew before too many checkpoints rest on them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.policy.incremental import LEAST_SHARE, REWRITE_EVERY, Base, unchanged

NBYTES = np.full(100, 1000)


def digests(changed: int = 0) -> npt.NDArray[np.uint8]:
    found = np.random.default_rng(0).integers(0, 256, (100, 16), np.uint8)
    found[:changed, 15] ^= 1  # a single bit is another digest
    return found


def a_base(saves: int = 0) -> Base[str, None]:
    return Base(attempt="a", structure=1, digests=digests(), places=None, saves=saves)


def test_the_unchanged_ones_are_found() -> None:
    found = unchanged(a_base(), 1, digests(changed=10), NBYTES)
    assert np.flatnonzero(~found).tolist() == list(range(10))


def test_nothing_is_shared_without_a_base_or_with_one_of_another_structure() -> None:
    assert not unchanged(None, 1, digests(), NBYTES).any()
    assert not unchanged(a_base(), 2, digests()[:50], NBYTES[:50]).any()


def test_too_little_in_common_is_not_worth_keeping_old_objects_for() -> None:
    most = round(100 * (1 - LEAST_SHARE))
    assert unchanged(a_base(), 1, digests(changed=most), NBYTES).any()
    assert not unchanged(a_base(), 1, digests(changed=most + 1), NBYTES).any()
    heavy = np.where(np.arange(100) < 10, 10**6, 1)  # it is bytes that count
    assert not unchanged(a_base(), 1, digests(changed=10), heavy).any()


def test_nothing_at_all_is_no_reference() -> None:
    empty = Base(attempt="a", structure=1, digests=digests()[:0], places=None)
    assert not unchanged(empty, 1, digests()[:0], NBYTES[:0]).any()


def test_every_kth_save_is_full() -> None:
    base: Base[str, None] = a_base()
    shared = 1  # the full save itself
    while unchanged(base, 1, digests(), NBYTES).any():
        shared += 1
        base = base.aged()
    assert shared == REWRITE_EVERY
