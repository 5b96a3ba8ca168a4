"""A save that is complete and uncommitted is committed by hand, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from resilient.catalog.adopt import adopt
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.prune import give_up
from resilient.catalog.verify import verify
from resilient.errors import ConflictError, CorruptError, ErrorKind, NotFoundError, ResilientError
from resilient.format import layout
from resilient.format.documents import Claim, Commit
from resilient.format.layout import Attempt
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, attempt_of, commit_of, dead_generation, new_generation, save


def a_run() -> tuple[MemoryStore, Claim, Attempt]:
    """Return a run of step 1, and an attempt at step 2 that only lacks its COMMIT."""
    store = MemoryStore()
    claim = dead_generation(store)
    save(store, claim, 1)
    return store, claim, save(store, claim, 2, commit=False)


def content(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}


def refused(store: MemoryStore, step: int, kind: ErrorKind, error: type[ResilientError] = ConflictError) -> str:
    before = content(store)
    with pytest.raises(error) as caught:
        adopt(store, step, clock=HandClock())
    assert caught.value.kind is kind, caught.value
    assert content(store) == before
    return str(caught.value)


@pytest.mark.field_report("BR-009")
def test_what_only_lacks_its_commit_becomes_the_newest_checkpoint() -> None:
    store, _, attempt = a_run()
    compared: list[tuple[int, int]] = []
    commit = adopt(store, 2, clock=HandClock(), progress=lambda done, total: compared.append((done, total)))
    assert (commit.attempt, commit.reason) == (attempt, "adopted")
    assert compared[-1][0] == compared[-1][1] > 0
    line = read_line(store)
    assert [one.step for one in line.commits] == [2, 1]
    assert verify(store, line.commits, deep=True, line=line).ok
    assert "committed already" in refused(store, 2, ErrorKind.ALREADY_SAVED)


def test_a_lost_commit_is_made_again_with_the_same_manifest() -> None:
    store, claim, _ = a_run()
    manifest = read_line(store).at(1).manifest
    store.delete(attempt_of(claim, 1).commit)
    assert adopt(store, 1, clock=HandClock()).manifest == manifest


def test_a_committer_that_wakes_up_meanwhile_and_the_adoption_agree() -> None:
    class Late(MemoryStore):
        woken = False

        def create(self, key: str, data: bytes) -> bool:
            if key.endswith("COMMIT") and not self.woken and self.armed:
                self.woken = True
                assert isinstance(commit_of(self, attempt), Commit)
            return super().create(key, data)

        armed = False

    store = Late()
    attempt = save(store, dead_generation(store), 2, commit=False)
    store.armed = True
    commit = adopt(store, 2, clock=HandClock())
    assert store.woken
    assert read_line(store).commits == (commit,)
    assert commit.reason == "test"


def test_a_missing_receipt_is_named() -> None:
    store, _, attempt = a_run()
    store.delete(attempt.receipt(1))
    assert "no receipt of rank 1" in refused(store, 2, ErrorKind.INCOMPLETE)


@pytest.mark.parametrize("harm", ["flipped", "short", "lost"])
def test_data_that_is_not_what_was_written_is_named(harm: str) -> None:
    store, _, attempt = a_run()
    key = attempt.data(1, 0)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    if harm == "lost":
        store.delete(key)
    else:
        store.put(key, [bytes(data[:-1]) if harm == "short" else bytes(data)])
    assert key in refused(store, 2, ErrorKind.BAD_DIGEST, CorruptError)


def test_what_the_run_has_not_gone_on_from_is_refused() -> None:
    store, first, _ = a_run()
    second = dead_generation(store, read_line(store).at(1))  # a restart that found step 1 only
    assert "went on from step 1" in refused(store, 2, ErrorKind.TAKEN_OVER)
    save(store, second, 5, commit=False)
    dead_generation(store, read_line(store).at(1))
    assert re.search("generation, 3, does not continue generation 2", refused(store, 5, ErrorKind.TAKEN_OVER))
    assert attempt_of(first, 2).commit not in content(store)


def test_what_a_restart_waits_for_is_adopted() -> None:
    store, _, attempt = a_run()
    commit = commit_of(store, attempt)
    assert isinstance(commit, Commit)
    dead_generation(store, commit)
    store.delete(attempt.commit)
    assert adopt(store, 2, clock=HandClock()).attempt == attempt


def test_a_run_that_starts_while_bytes_are_compared_is_not_overtaken() -> None:
    class Started(MemoryStore):
        armed = False

        def read_into(self, key: str, start: int, into: memoryview) -> None:
            if self.armed:
                self.armed = False
                new_generation(self, read_line(self).at(1))
            super().read_into(key, start, into)

    store = Started()
    claim = dead_generation(store)
    save(store, claim, 1)
    attempt = save(store, claim, 2, commit=False)
    store.armed = True
    with pytest.raises(ConflictError, match="went on from step 1"):
        adopt(store, 2, clock=HandClock())
    assert attempt.commit not in content(store)


def test_the_living_are_left_to_commit_themselves() -> None:
    store = MemoryStore()
    claim = new_generation(store)  # of this process
    save(store, claim, 1, commit=False)
    assert "is alive" in refused(store, 1, ErrorKind.RUN_IN_USE)


def test_nothing_is_adopted_while_a_restart_chooses_where_to_go_on() -> None:
    store, _, _ = a_run()
    starting = claim_generation(store, world_size=1, launch="b", heartbeat=False)  # of this process
    assert "generation 2" in refused(store, 2, ErrorKind.RUN_IN_USE)
    write_base(store, starting, read_line(store).at(1))
    refused(store, 2, ErrorKind.TAKEN_OVER)


def test_what_was_given_up_or_never_tried_is_refused_with_what_there_is() -> None:
    store, claim, attempt = a_run()
    commit_of(store, attempt)
    store.delete(attempt.commit)  # its manifest is there: that is what tells a complete one in a listing
    with pytest.raises(NotFoundError) as caught:
        adopt(store, 3, clock=HandClock())
    assert caught.value.hint == "these are complete and not committed: 2"
    give_up(store, attempt_of(claim, 2), HandClock(), reason="retention")
    assert "given up" in refused(store, 2, ErrorKind.NO_SUCH_STEP, NotFoundError)


def test_a_damaged_commit_or_claim_is_not_guessed_at() -> None:
    store, claim, attempt = a_run()
    store.put(attempt.commit, [b"{"])
    assert attempt.commit in refused(store, 2, ErrorKind.MALFORMED, CorruptError)
    store.delete(attempt.commit)
    store.put(layout.claim(claim.generation), [b"{"])
    assert "claim" in refused(store, 2, ErrorKind.MALFORMED, CorruptError)


def test_a_listing_that_lags_behind_hides_nothing() -> None:
    class Lagging(MemoryStore):
        def list(self, prefix: str) -> Iterator[str]:
            return (key for key in super().list(prefix) if not key.startswith("steps/000000000002/"))

    store = Lagging()
    claim = dead_generation(store)
    save(store, claim, 1)
    attempt = save(store, claim, 2, commit=False)
    assert adopt(store, 2, clock=HandClock()).attempt == attempt
