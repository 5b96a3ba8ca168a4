"""What is noted beside a checkpoint: by exact names, and what a damaged note means."""

from __future__ import annotations

import itertools
import random

import pytest

from resilient.catalog.line import read_line
from resilient.catalog.marks import (
    FAILED,
    GOOD,
    PINNED,
    RUN,
    USER,
    VERIFIED,
    is_failed,
    is_pinned,
    list_marks,
    mark_commit,
    read_mark,
    remove_mark,
    remove_marks,
    write_mark,
)
from resilient.catalog.prune import give_up
from resilient.errors import NotFoundError
from resilient.format.layout import Attempt
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, attempt_of, new_generation, save

CLOCK = HandClock()
SOME = Attempt(step=7, generation=2, nonce="0123456789abcdef")


class Unlisted(MemoryStore):
    """A store whose listings show no marks yet."""

    def list(self, prefix):  # type: ignore[no-untyped-def]
        return (key for key in super().list(prefix) if "/marks/" not in key)


def note(store: MemoryStore, kind: str, by: str = USER, why: str = "") -> None:
    write_mark(store, SOME, kind, by=by, why=why, clock=CLOCK)


@pytest.mark.parametrize(("kind", "by"), [*itertools.product((PINNED, FAILED, GOOD, VERIFIED), (USER, RUN))])
def test_a_mark_says_who_and_why_until_it_is_removed(kind: str, by: str) -> None:
    store = Unlisted()
    note(store, kind, by, "because")
    found = read_mark(store, SOME, kind, by)
    assert found is not None
    assert (found.kind, found.by, found.why, bool(found.host)) == (kind, by, "because", True)
    note(store, kind, by, "another reason")
    assert read_mark(store, SOME, kind, by) == found
    assert list_marks(store, SOME) == [found]
    assert remove_mark(store, SOME, kind, by)
    assert not remove_mark(store, SOME, kind, by)
    assert read_mark(store, SOME, kind, by) is None


def test_the_last_word_counts_whoever_has_said_the_one_before() -> None:
    draw = random.Random(4)
    for seed in range(200):
        store = Unlisted()
        said = [(draw.choice((FAILED, GOOD)), draw.choice((USER, RUN))) for _ in range(draw.randint(1, 6))]
        for kind, by in said:
            note(store, kind, USER if kind == GOOD else by)
        assert (is_failed(store, SOME) is not None) == (said[-1][0] == FAILED), (seed, said)


def test_whoever_is_killed_between_two_words_leaves_the_later_one() -> None:
    class Killed(Exception):  # noqa: N818
        pass

    class Mortal(Unlisted):
        def delete(self, key: str) -> None:
            raise Killed(key)

    store = Mortal()
    note(store, PINNED)
    store.put(SOME.mark(GOOD, USER), [b"whatever was said before"])
    with pytest.raises(Killed):
        note(store, FAILED)
    assert is_failed(store, SOME) is not None


@pytest.mark.parametrize("content", [b"", b"{}", b"torn"], ids=["empty", "no document", "torn"])
def test_a_damaged_pin_is_a_pin_and_a_damaged_failure_is_none(content: bytes) -> None:
    store = Unlisted()
    store.put(SOME.mark(PINNED, USER), [content])
    store.put(SOME.mark(FAILED, RUN), [content])
    assert is_pinned(store, SOME) is not None
    assert is_failed(store, SOME) is None
    note(store, FAILED, RUN, "once more")
    found = is_failed(store, SOME)
    assert found is not None
    assert found.why == "once more"


def test_a_mark_of_another_checkpoint_says_nothing_here() -> None:
    store = Unlisted()
    note(store, FAILED)
    other = Attempt(step=8, generation=2, nonce=SOME.nonce)
    store.put(other.mark(FAILED, USER), [store.get(SOME.mark(FAILED, USER))])
    assert is_failed(store, other) is None


def test_a_mark_that_comes_after_the_tombstone_is_refused_and_leaves_nothing() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    save(store, claim, 1)
    save(store, claim, 2)
    commit = read_line(store).at(1)
    give_up(store, commit.attempt, CLOCK, reason="a pruner that was quicker")
    with pytest.raises(NotFoundError, match="being deleted"):
        mark_commit(store, commit, PINNED, by=USER, why="", clock=CLOCK)
    assert is_pinned(store, attempt_of(claim, 1)) is None


def test_unpinning_finds_pins_under_any_name_and_those_that_are_not_listed() -> None:
    store = MemoryStore()
    store.put(SOME.mark(PINNED, "release"), [b""])
    note(store, PINNED, RUN)
    assert remove_marks(store, SOME, PINNED) == 2
    assert list(store.list(SOME.marks)) == []
    stale = Unlisted()
    note(stale, PINNED)
    assert remove_marks(stale, SOME, PINNED) == 1
