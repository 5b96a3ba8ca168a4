"""G1, G3, G12: which state of the tiers a start finishes, and which it leaves alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.outcomes import write_outcome
from resilient.catalog.prune import give_up
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saver import Saver
from resilient.engine.tiers.finishing import REASON, Finishing
from resilient.errors import ErrorKind, StoreError
from resilient.events import Bus, Event, Notice, Tiered, TiersFinished
from resilient.format import layout
from resilient.format.digest import BytesLike
from resilient.format.documents import Claim, Commit, Outcome
from resilient.format.layout import Attempt
from resilient.policy.demotion import NUMERIC
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

    def wait_for(self, step: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with self.told[rank]:
                assert self.told[rank].wait_for(lambda rank=rank: step in self.tiered[rank], 30)  # type: ignore[misc]

    def save(self, step: int) -> None:
        handles = [
            saver.save(step, capture({"s": self.items(step)}, rank=rank, world_size=len(self.savers)), reason="test")
            for rank, saver in enumerate(self.savers)
        ]
        for handle in handles:
            handle.wait(30)
        self.wait_for(step, range(len(self.savers)))

    def tier(self, rank: int) -> LocalStore:
        return LocalStore(self.folder / f"node-{rank}")

    def attempt(self, step: int) -> Attempt:
        return Attempt(step, self.claim.generation, self.claim.nonce)

    def close(self) -> None:
        for saver in self.savers:
            saver.close(30)

    def lose(self, rank: int) -> None:
        shutil.rmtree(self.folder / f"node-{rank}")


def job(store: Failing, folder: Path, size: int = 2, continues: Commit | None = None) -> Job:
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
        how = SaveSettings(chunk_nbytes=CHUNK, tiers=(Tier(name="memory", path=str(folder / f"node-{rank}")),))
        peers = Peers(rank, size, values)
        made.savers.append(Saver(store, claim, peers, how, run_id="0" * 16, bus=bus))
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


def start(store: Failing, folder: Path, nodes: Sequence[Sequence[int]]) -> Start:
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
            timeout_s=30,
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
    outcome = Outcome(
        generation=first.claim.generation,
        nonce=first.claim.nonce,
        launch=first.claim.launch,
        rank=0,
        error="FloatingPointError",
        message="the loss is not finite",
        cause=NUMERIC,
        program="",
        step=2,
        created="2026-01-01T00:00:00Z",
    )
    write_outcome(store, outcome)
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
