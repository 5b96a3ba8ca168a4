"""G11 and G12 where retention of the past meets a life that goes back: neither the step nor its data is lost."""

from __future__ import annotations

import itertools

import pytest

from resilient.catalog.copy import copy
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.hints import propose, proposed
from resilient.catalog.line import Line, is_given_up, read_line
from resilient.catalog.marks import PINNED, USER, is_pinned, mark_commit, reading
from resilient.catalog.prune import give_up, prune
from resilient.catalog.verify import verify
from resilient.errors import ConflictError, ErrorKind, NotFoundError, StoreError
from resilient.format import layout
from resilient.format.documents import Claim, Commit, encode_document
from resilient.format.frame import seal_json
from resilient.format.layout import Attempt
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, attempt_of, commit_of, new_generation, save

CLOCK = HandClock()


def steps(store: MemoryStore) -> list[tuple[int, int]]:
    return [(commit.step, commit.generation) for commit in read_line(store).commits]


def buried(store: MemoryStore, attempt: Attempt, line: Line) -> None:
    """Give up as a pruner does that has read this line, however long ago."""
    give_up(store, attempt, CLOCK, reason="retention", chain=line.chain)


class GoneBack:
    """A run of steps 10, 20, 30, whose second generation goes back to 10; ``past``: the line before it did."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.first = new_generation(self.store)
        for step in (10, 20, 30):
            save(self.store, self.first, step)
        self.past = read_line(self.store)
        self.start: Commit = self.past.at(10)
        self.second = new_generation(self.store, self.start)

    def prune(self, *keep: int, line: Line | None = None) -> None:
        prune(self.store, line or read_line(self.store), set(keep), clock=CLOCK, grace_s=0)

    def keys(self, attempt: Attempt) -> list[str]:
        name = f"{attempt.step:012d}"
        return sorted(key for key in self.store.list("") if name in key and attempt.nonce in key)


def test_a_tombstone_of_the_past_does_not_take_what_a_later_generation_continues_from() -> None:
    run = GoneBack()
    buried(run.store, run.start.attempt, run.past)
    assert steps(run.store) == [(10, 1)]
    with reading(run.store, run.start):
        pass
    mark_commit(run.store, run.start, PINNED, by=USER, why="", clock=CLOCK)
    assert is_pinned(run.store, run.start.attempt) is not None
    assert new_generation(run.store, run.start).generation == 3
    assert steps(run.store) == [(10, 1)]


def test_a_tombstone_of_the_past_counts_everywhere_else() -> None:
    run = GoneBack()
    save(run.store, run.first, 5)  # before the branch, and not continued from
    assert steps(run.store) == [(10, 1), (5, 1)]
    buried(run.store, attempt_of(run.first, 5), run.past)
    assert steps(run.store) == [(10, 1)]
    save(run.store, run.second, 20)
    buried(run.store, attempt_of(run.second, 20), read_line(run.store))
    assert steps(run.store) == [(10, 1)]


@pytest.mark.parametrize("content", ["no head", "torn", "empty"])
def test_one_of_the_first_format_and_a_torn_one_hold_for_ever(content: str) -> None:
    run = GoneBack()
    attempt = run.start.attempt
    first = {"kind": "tombstone", "step": 10, "generation": 1, "nonce": attempt.nonce, "created": "", "reason": ""}
    made = {"no head": seal_json(first), "torn": seal_json(first)[:-9], "empty": b""}
    run.store.create(attempt.tombstone, made[content])
    assert steps(run.store) == []
    with pytest.raises(NotFoundError, match="being deleted"), reading(run.store, run.start):
        pass


def test_a_pruner_of_the_past_leaves_the_data_and_whoever_has_gone_back_keeps_it_whole() -> None:
    run = GoneBack()
    buried(run.store, run.start.attempt, run.past)
    before = run.keys(run.start.attempt)
    with pytest.raises(ConflictError):
        run.prune(30, line=run.past)
    run.store.delete(layout.claim(2))  # even where nothing tells it that it is outdated, but the mark
    run.store.delete(layout.base(2))
    run.store.put(layout.claim(2), [b""])
    run.prune(30, line=run.past)
    assert run.keys(run.start.attempt) == before


def test_the_mark_alone_holds_a_checkpoint_back_from_a_pruner_that_does_not_know_the_generation() -> None:
    store = MemoryStore()
    first = new_generation(store)
    for step in (10, 20, 30):
        save(store, first, step)
    line = read_line(store)
    claim = claim_generation(store, world_size=1, launch="b", heartbeat=False)

    class Stopped(Exception):  # noqa: N818
        pass

    class Stops(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if key == layout.base(2):
                raise Stopped
            return super().create(key, data)

    stops = Stops()
    stops._objects = store._objects
    with pytest.raises(Stopped):
        write_base(stops, claim, line.at(10))
    members = {name: getattr(claim, name) for name in claim.__slots__}
    store.put(layout.claim(2), [encode_document(Claim(**members | {"pid": 2**22 + 1}))])  # it has died right there
    done = prune(store, line, {30}, clock=CLOCK, grace_s=0)
    assert done.steps == (20,)
    assert [(held.step, held.why) for held in done.held] == [(10, "continued by generation 2")]
    third = new_generation(store, read_line(store).at(30))  # knows of it: nobody has continued
    save(store, third, 40)
    assert prune(store, read_line(store), {40}, clock=CLOCK, grace_s=0).steps == (10, 30)


def test_a_later_line_that_does_not_need_it_gives_it_up_under_a_name_of_its_own() -> None:
    run = GoneBack()
    attempt = run.start.attempt
    buried(run.store, attempt, run.past)
    void = run.store.get(attempt.tombstone)
    for step in (20, 30):
        save(run.store, run.second, step)
    line = read_line(run.store)
    buried(run.store, attempt, line)
    assert run.store.get(attempt.tombstone) == void, "nothing is ever replaced"
    assert steps(run.store) == [(30, 2), (20, 2)]
    buried(run.store, attempt, run.past)  # the zombie, once more: its decision was late already
    assert steps(run.store) == [(30, 2), (20, 2)]
    run.prune(30, 20)
    assert run.keys(attempt) == [attempt.tombstone, attempt.tombstone_of(2)]
    assert verify(run.store, read_line(run.store).commits, deep=True).ok


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_pruners_of_three_heads_may_land_in_any_order(order: tuple[int, ...]) -> None:
    """Generations 2 and 3 both continue from step 10; it is gone as soon as head 3 has decided so, and not before."""
    run = GoneBack()
    attempt = run.start.attempt
    lines = {1: run.past, 2: read_line(run.store)}
    third = new_generation(run.store, run.start)
    save(run.store, third, 20)
    lines[3] = read_line(run.store)
    landed: set[int] = set()
    for head in order:
        buried(run.store, attempt, lines[head])
        landed.add(head)
        assert is_given_up(run.store, attempt) == (3 in landed), order
        assert ((10, 1) in steps(run.store)) == (3 not in landed), order
    buried(run.store, attempt, lines[2])  # the first one, whose answer was lost, asks again
    assert steps(run.store) == [(20, 3)]


@pytest.mark.parametrize("head", ["of the past", "of now"])
def test_whoever_finds_a_tombstone_after_its_mark_starts_again(head: str) -> None:
    store = MemoryStore()
    first = new_generation(store)
    for step in (10, 20):
        save(store, first, step)
    line = read_line(store)
    buried(store, attempt_of(first, 10), line)
    claim = claim_generation(store, world_size=1, launch="b", heartbeat=False)
    if head == "of now":
        new_generation(store, line.at(20))
        claim = claim_generation(store, world_size=1, launch="c", heartbeat=False)
    with pytest.raises(ConflictError, match="step 10") as caught:
        write_base(store, claim, line.at(10))
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    assert layout.base(claim.generation) not in list(store.list(layout.GENERATIONS))
    assert steps(store) == [(20, 1)]


def test_a_mark_that_cannot_be_written_fails_the_base() -> None:
    class NoMarks(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if "/marks/" in key:
                raise StoreError("denied", kind=ErrorKind.ACCESS_DENIED)
            return super().create(key, data)

    store = NoMarks()
    first = new_generation(store)
    save(store, first, 10)
    with pytest.raises(StoreError, match="denied"):
        new_generation(store, read_line(store).at(10))
    assert layout.base(2) not in list(store.list(layout.GENERATIONS))


# Hints ----------------------------------------------------------------------------------------------------------------


class Unlisted(MemoryStore):
    """Shows no attempt in listings: its directories are cached."""

    def list(self, prefix):  # type: ignore[no-untyped-def]
        return (key for key in super().list(prefix) if not key.startswith(layout.STEPS))


def test_the_newest_commit_is_found_without_a_listing_and_so_is_what_was_continued() -> None:
    store = Unlisted()
    first = new_generation(store)
    for step in (10, 20):
        save(store, first, step)
    assert steps(store) == [(20, 1), (10, 1)]
    second = new_generation(store, read_line(store).at(20))
    assert steps(store) == [(20, 1)]
    save(store, second, 30)
    assert steps(store) == [(30, 2), (20, 1)]


def test_a_hint_only_proposes() -> None:
    store = Unlisted()
    claim = new_generation(store)
    save(store, claim, 10)
    propose(store, attempt_of(claim, 20))  # and then its committer died
    assert steps(store) == [(10, 1)]
    foreign = Attempt(step=10, generation=1, nonce="f" * 16)
    assert proposed(store, foreign.generation, foreign.nonce) == []
    store.put(layout.newest(1), [b"torn"])
    assert steps(store) == []
    save(store, claim, 30)
    assert steps(store) == [(30, 1)]


def test_a_hint_of_an_older_step_takes_no_newer_one_away() -> None:
    store = Unlisted()
    claim = new_generation(store)
    for step in (50, 10, 20, 30, 40, 5):
        propose(store, attempt_of(claim, step))
    assert [one.step for one in proposed(store, 1, claim.nonce)] == [50, 40, 30, 20]


def test_a_hint_that_may_not_be_written_over_costs_no_save_and_a_store_that_is_away_does() -> None:
    class Picky(MemoryStore):
        retryable = False

        def put(self, key, parts):  # type: ignore[no-untyped-def]
            if key == layout.newest(1):
                raise StoreError("no", kind=ErrorKind.UNREACHABLE, retryable=self.retryable)
            super().put(key, parts)

    store = Picky()
    claim = new_generation(store)
    save(store, claim, 10)
    assert steps(store) == [(10, 1)]
    attempt = save(store, claim, 20, commit=False)
    store.retryable = True
    with pytest.raises(StoreError):
        commit_of(store, attempt)
    assert steps(store) == [(10, 1)]


def test_a_copy_has_a_hint_of_its_own() -> None:
    store, destination = MemoryStore(), Unlisted()
    claim = new_generation(store)
    save(store, claim, 10)
    copied = copy(store, read_line(store).at(10), destination, clock=CLOCK)
    assert proposed(destination, 1, copied.nonce) == [copied.attempt]
    assert steps(destination) == [(10, 1)]
