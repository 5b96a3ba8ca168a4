"""G1, G3, G12: which state of the tiers a start finishes, and which it leaves alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.marks import FAILED, USER, mark_commit
from resilient.catalog.outcomes import write_outcome
from resilient.catalog.prune import give_up
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saver import Saver
from resilient.engine.tiers.finishing import REASON, Finishing
from resilient.errors import ErrorKind, ResilientError, StoreError
from resilient.events import Bus, Event, Notice, Tiered, TiersFinished
from resilient.format import layout
from resilient.format.digest import BytesLike
from resilient.format.documents import Claim, Commit, Outcome
from resilient.format.layout import Attempt
from resilient.policy.demotion import CODE, NUMERIC
from resilient.state.capture import capture
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.nearest import Shards
from resilient.writer.messages import Tier
from tests.engine.rank_threads import SharedValues, on_ranks

CHUNK = 1 << 12


class Failing(MemoryStore):
    """A store that takes no data when the test says so."""

    full = False

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if self.full and key.startswith("data/"):
            raise StoreError("there is no room", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


@dataclass
class Job:
    """Ranks of one generation, each on a node with a tier of its own."""

    store: Failing
    folder: Path
    claim: Claim
    savers: list[Saver]
    told: list[threading.Condition]
    tiered: list[set[int]]

    def items(self, step: int) -> dict[str, object]:
        return {"w": torch.arange(3000.0) + step, "lr": float(step)}

    def keep(self, step: int, ranks: Sequence[int] | None = None) -> None:
        """Have the state of a step in the tiers of some ranks, or of all."""
        chosen = range(len(self.savers)) if ranks is None else ranks
        for rank in chosen:
            captured = capture({"s": self.items(step)}, rank=rank, world_size=len(self.savers))
            assert self.savers[rank].keep_near(step, captured)
        self.wait_for(step, chosen)
        if ranks is None:
            self.wait_until_decided(step)

    def wait_until_decided(self, step: int) -> None:
        end = time.monotonic() + 30
        for saver in self.savers:
            assert saver.near.complete is not None
            while not saver.near.complete.settled(step):
                assert time.monotonic() < end
                time.sleep(0.01)
                saver.near.complete.newest()

    def wait_for(self, step: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with self.told[rank]:
                assert self.told[rank].wait_for(lambda rank=rank: step in self.tiered[rank], 30)  # type: ignore[misc]

    def try_save(self, step: int) -> list[bool]:
        """Save a state; say for each rank whether that is committed."""
        handles = [
            saver.save(step, capture({"s": self.items(step)}, rank=rank, world_size=len(self.savers)), reason="test")
            for rank, saver in enumerate(self.savers)
        ]
        well = []
        for handle in handles:
            try:
                handle.wait(30)
            except ResilientError:
                well.append(False)
            else:
                well.append(True)
        self.wait_for(step, range(len(self.savers)))
        return well

    def save(self, step: int) -> None:
        handles = [
            saver.save(step, capture({"s": self.items(step)}, rank=rank, world_size=len(self.savers)), reason="test")
            for rank, saver in enumerate(self.savers)
        ]
        for handle in handles:
            handle.wait(30)
        self.wait_for(step, range(len(self.savers)))
        self.wait_until_decided(step)

    def tier(self, rank: int) -> LocalStore:
        return LocalStore(self.folder / f"node-{rank}")

    def attempt(self, step: int) -> Attempt:
        return Attempt(step, self.claim.generation, self.claim.nonce)

    def close(self) -> None:
        for saver in self.savers:
            saver.close(30)

    def lose(self, rank: int) -> None:
        shutil.rmtree(self.folder / f"node-{rank}")


def job(store: Failing, folder: Path, size: int = 2, continues: Commit | None = None, **how: Any) -> Job:
    open_run(store, create=True, clock=SYSTEM_CLOCK)
    claim = claim_generation(store, world_size=size, launch="0" * 32, heartbeat=False)
    write_base(store, claim, continues)
    values = SharedValues()
    made = Job(store, folder, claim, [], [threading.Condition() for _ in range(size)], [set() for _ in range(size)])
    for rank in range(size):
        bus = Bus()

        def note(event: Event, rank: int = rank) -> None:
            if isinstance(event, Tiered):
                with made.told[rank]:
                    made.tiered[rank].add(event.step)
                    made.told[rank].notify_all()

        bus.subscribe(note)
        tiers = (Tier(name="memory", path=str(folder / f"node-{rank}")),)
        settings = SaveSettings(chunk_nbytes=CHUNK, tiers=tiers, **how)
        peers = Peers(rank, size, values)
        made.savers.append(Saver(store, claim, peers, settings, run_id="0" * 16, bus=bus))
    return made


@dataclass
class Start:
    """What a later start made of the tiers."""

    commits: list[Commit | None]
    events: list[Event] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        (step,) = {None if commit is None else commit.step for commit in self.commits}
        return step

    @property
    def notices(self) -> str:
        return "\n".join(each.message for each in self.events if isinstance(each, Notice))


def start(store: Failing, folder: Path, nodes: Sequence[Sequence[int]], timeout_s: float = 30) -> Start:
    """Start ranks that see the tiers of these nodes; return what they finish."""
    claim = claim_generation(store, world_size=len(nodes), launch="1" * 32, heartbeat=False)
    begun = Start([])
    bus = Bus()
    bus.subscribe(begun.events.append)

    def one(peers: Peers) -> Commit | None:
        tiers = []
        for node in nodes[peers.rank]:
            here = LocalStore(folder / f"node-{node}", volatile=True)
            said = lambda message: bus.emit(Notice(message=message))
            tiers.append((here, Shards("memory", here, notice=said)))
        finishing = Finishing(
            store,
            tiers,
            peers,
            generation=claim.generation,
            max_bandwidth=None,
            timeout_s=timeout_s,
            bus=bus,
            clock=SYSTEM_CLOCK,
        )
        return finishing.finish("0" * 16)

    for found in on_ranks(len(nodes), one):
        if isinstance(found, Exception):
            raise found
        assert found is None or isinstance(found, Commit)
        begun.commits.append(found)
    return begun


def ended(claim: Claim, cause: str) -> Outcome:
    return Outcome(
        generation=claim.generation,
        nonce=claim.nonce,
        launch=claim.launch,
        rank=0,
        error="FloatingPointError",
        message="the loss is not finite",
        cause=cause,
        program="",
        step=2,
        created="2026-01-01T00:00:00Z",
    )


@pytest.fixture
def store() -> Failing:
    return Failing()


@pytest.fixture
def first(store: Failing, tmp_path: Path) -> Iterator[Job]:
    made = job(store, tmp_path)
    yield made
    made.close()


def holds(store: Failing, step: int, expected: dict[str, object]) -> None:
    into: dict[str, object] = {"w": torch.zeros(3000), "lr": 0.0}
    load_into(store, {"s": into}, Peers(0, 1, SharedValues()), read_line(store).at(step), bus=Bus())
    assert torch.equal(into["w"], expected["w"])  # type: ignore[arg-type]
    assert into["lr"] == expected["lr"]


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1]], [[], [0], [1]], [[0, 1], [0, 1]]])
def test_the_newest_complete_state_is_committed_on_any_number_of_ranks(
    store: Failing, first: Job, tmp_path: Path, nodes: list[list[int]]
) -> None:
    first.save(1)
    for step in (2, 3):
        first.keep(step)
    begun = start(store, tmp_path, nodes)
    assert begun.step == 3
    assert [commit.step for commit in read_line(store).commits] == [3, 1]
    assert read_line(store).at(3).reason == REASON
    assert sum(isinstance(each, TiersFinished) for each in begun.events) == len(nodes)
    holds(store, 3, first.items(3))


@pytest.mark.field_report("BR-049")
def test_of_different_steps_in_memory_the_newest_that_all_ranks_hold_is_taken(
    store: Failing, first: Job, tmp_path: Path
) -> None:
    first.keep(5)
    first.keep(6, ranks=[0])
    assert start(store, tmp_path, [[0], [1]]).step == 5
    holds(store, 5, first.items(5))


def test_a_part_that_is_in_the_store_already_need_not_be_in_a_tier(store: Failing, first: Job, tmp_path: Path) -> None:
    first.keep(2)
    attempt = first.attempt(2)
    tier = first.tier(1)
    for key in tier.list(""):  # as rank 1's writer had done before its node was lost
        store.put(key, [tier.get(key)])
    first.lose(1)
    assert start(store, tmp_path, [[0]]).step == 2
    assert attempt == read_line(store).commits[0].attempt
    holds(store, 2, first.items(2))


def test_a_lost_node_without_a_copy_leaves_what_is_committed(store: Failing, first: Job, tmp_path: Path) -> None:
    first.save(1)
    first.keep(2)
    first.lose(1)
    begun = start(store, tmp_path, [[0]])
    assert begun.step is None
    assert [commit.step for commit in read_line(store).commits] == [1]


def test_a_copy_on_another_node_stands_for_a_lost_one(store: Failing, first: Job, tmp_path: Path) -> None:
    first.keep(2)
    for key in first.tier(1).list(""):
        first.tier(0).put(key, [first.tier(1).get(key)])
    first.lose(1)
    assert start(store, tmp_path, [[0]]).step == 2
    holds(store, 2, first.items(2))


def test_a_damaged_part_is_never_committed_and_an_older_whole_state_is(
    store: Failing, first: Job, tmp_path: Path
) -> None:
    first.keep(2)
    first.keep(3)
    tier = first.tier(1)
    (key,) = [key for key in tier.list("data/") if layout.parse_data(key) == first.attempt(3)]
    content = bytearray(tier.get(key))
    content[100] ^= 1
    tier.put(key, [content])
    begun = start(store, tmp_path, [[0], [1]])
    assert begun.step == 2
    assert key in begun.notices
    assert "step 3 of generation 1 cannot be finished" in begun.notices
    holds(store, 2, first.items(2))


def test_what_another_generation_has_left_behind_is_not_taken(store: Failing, first: Job, tmp_path: Path) -> None:
    first.save(1)
    first.keep(2)
    other = claim_generation(store, world_size=1, launch="2" * 32, heartbeat=False)
    write_base(store, other, read_line(store).at(1))  # it has gone on from step 1 elsewhere
    assert start(store, tmp_path, [[0], [1]]).step is None


def test_what_is_not_newer_than_the_newest_commit_is_not_copied(store: Failing, first: Job, tmp_path: Path) -> None:
    first.keep(2)
    first.save(3)
    assert start(store, tmp_path, [[0], [1]]).step is None
    assert [commit.step for commit in read_line(store).commits] == [3]


def test_what_was_given_up_is_not_taken(store: Failing, first: Job, tmp_path: Path) -> None:
    first.keep(2)
    give_up(store, first.attempt(2), SYSTEM_CLOCK, reason="a test")
    assert start(store, tmp_path, [[0], [1]]).step is None
    assert not list(store.list("data/")), "not even copied"


def test_a_life_that_ended_with_a_numeric_failure_is_continued_from_its_commit(
    store: Failing, first: Job, tmp_path: Path
) -> None:
    first.save(1)
    first.keep(2)
    write_outcome(store, ended(first.claim, NUMERIC))
    begun = start(store, tmp_path, [[0], [1]])
    assert begun.step is None
    assert "numeric failure" in begun.notices


def test_a_store_that_takes_no_copy_leaves_what_is_committed(store: Failing, first: Job, tmp_path: Path) -> None:
    first.save(1)
    first.keep(2)
    first.close()
    store.full = True
    begun = start(store, tmp_path, [[0], [1]])
    assert begun.step is None
    assert "there is no room" in begun.notices
    assert [commit.step for commit in read_line(store).commits] == [1]


def test_nothing_is_asked_of_the_line_where_the_tiers_are_empty(store: Failing, tmp_path: Path) -> None:
    open_run(store, create=True, clock=SYSTEM_CLOCK)
    assert start(store, tmp_path, [[0], [1]]).step is None


def test_what_continues_a_checkpoint_that_is_marked_failed_is_not_finished(
    store: Failing, first: Job, tmp_path: Path
) -> None:
    first.save(1)
    first.keep(2)
    (commit,) = read_line(store).commits
    mark_commit(store, commit, FAILED, by=USER, why="it diverges", clock=SYSTEM_CLOCK)
    begun = start(store, tmp_path, [[0], [1]])
    assert begun.step is None
    assert "marked failed (it diverges)" in begun.notices


def test_the_life_that_made_a_state_says_whether_it_is_sound(store: Failing, first: Job, tmp_path: Path) -> None:
    first.keep(2)
    write_outcome(store, ended(first.claim, NUMERIC))
    later = claim_generation(store, world_size=2, launch="2" * 32, heartbeat=False)  # which has not restored anything
    write_outcome(store, ended(later, CODE))
    assert start(store, tmp_path, [[0], [1]]).step is None


def test_a_tier_that_cannot_be_listed_is_told_and_left_out(
    store: Failing, first: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.save(1)
    first.keep(2)
    real = LocalStore.list

    def broken(self: LocalStore, prefix: str) -> Iterator[str]:
        if self.root.name == "node-1":
            raise StoreError("Input/output error", kind=ErrorKind.IO)
        return real(self, prefix)

    monkeypatch.setattr(LocalStore, "list", broken)
    begun = start(store, tmp_path, [[0], [1]])
    assert begun.step is None
    assert "Input/output error" in begun.notices


def test_a_rank_that_copies_for_too_long_costs_the_state_and_not_the_job(
    store: Failing, first: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.save(1)
    first.keep(2)
    real = Finishing._copy

    def slow(self: Finishing, attempt: Attempt, ranks: Sequence[int]) -> int:
        if self._peers.rank == 1:
            time.sleep(3)
        return real(self, attempt, ranks)

    monkeypatch.setattr(Finishing, "_copy", slow)
    begun = start(store, tmp_path, [[0], [1]], timeout_s=1)
    assert begun.step is None
    assert "cannot be finished from the tiers: no answer from rank 1" in begun.notices


def test_a_save_that_one_rank_cannot_store_is_finished_from_the_tiers(
    store: Failing, first: Job, tmp_path: Path
) -> None:
    first.save(1)
    store.full = True
    assert not any(first.try_save(2))
    store.full = False
    assert not any(each.endswith("TOMBSTONE") for each in store.list("steps/"))
    assert start(store, tmp_path, [[0], [1]]).step == 2
    holds(store, 2, first.items(2))


def test_what_could_not_be_stored_is_given_up_after_the_next_commit(store: Failing, first: Job) -> None:
    store.full = True
    assert not any(first.try_save(1))
    store.full = False
    first.wait_until_decided(1)
    first.save(2)
    wait_for(lambda: first.attempt(1).tombstone in list(store.list("steps/")))


def test_an_end_is_not_in_the_tiers_which_cannot_say_that_it_is_one(store: Failing, first: Job) -> None:
    captured = [capture({"s": first.items(1)}, rank=rank, world_size=2) for rank in range(2)]
    handles = [
        saver.save(1, mine, reason="end", tiers=False) for saver, mine in zip(first.savers, captured, strict=True)
    ]
    for handle in handles:
        handle.wait(30)
    assert not list(first.tier(0).list("steps/"))
    assert not list(first.tier(1).list("steps/"))


def test_there_are_never_more_than_two_states_in_a_tier(store: Failing, first: Job) -> None:
    first.keep(1)
    first.keep(2, ranks=[0])  # which the other rank may still write
    captured = [capture({"s": first.items(3)}, rank=rank, world_size=2) for rank in range(2)]
    for handle in [saver.save(3, mine, reason="test") for saver, mine in zip(first.savers, captured, strict=True)]:
        handle.wait(30)
    assert {parsed[0].step for key in first.tier(0).list("steps/") if (parsed := layout.parse_attempt(key))} == {1, 2}


def test_a_tier_that_hangs_keeps_no_save_and_is_given_up(
    tmp_path: Path, store: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = threading.Event()
    monkeypatch.setattr("resilient.writer.tiering._write", lambda *_: goes.wait(60))
    monkeypatch.setattr("resilient.engine.saver._TIERS_S", 0.1)
    here = job(store, tmp_path, size=1, commit_timeout_s=3, staging_slots=1)
    try:
        (saver,) = here.savers
        assert saver.keep_near(1, capture({"s": here.items(1)}, rank=0, world_size=1))
        wait_for(lambda: all(each.ordered_s is not None for each in saver.near._on_way.values()))
        began_s = time.monotonic()
        saver.save(2, capture({"s": here.items(2)}, rank=0, world_size=1), reason="test").wait(30)
        assert time.monotonic() - began_s < 2.5, "before the deadline"
        assert [commit.step for commit in read_line(store).commits] == [2]
        assert not saver.keep_near(3, capture({"s": here.items(3)}, rank=0, world_size=1))
        goes.set()
        monkeypatch.undo()
        wait_for(lambda: not saver.near.busy)
        here.keep(4)
    finally:
        goes.set()
        here.close()


def test_a_tier_that_hangs_while_nothing_is_saved_is_told_and_used_no_more(
    tmp_path: Path, store: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = threading.Event()
    monkeypatch.setattr("resilient.writer.tiering._write", lambda *_: goes.wait(60))
    here = job(store, tmp_path, size=1, commit_timeout_s=0.5)
    try:
        (saver,) = here.savers
        assert saver.keep_near(1, capture({"s": here.items(1)}, rank=0, world_size=1))
        wait_for(lambda: "not there after 0.5 s" in saver.near._fault)
        assert not saver.near._on_way
        assert not saver.keep_near(2, capture({"s": here.items(2)}, rank=0, world_size=1))
    finally:
        goes.set()
        here.close()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)
