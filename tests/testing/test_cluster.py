"""The simulated cluster: the protocol holds in it whatever fails, and it finds what would break the protocol."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from resilient.catalog import commit as committing
from resilient.catalog import line as lines
from resilient.catalog.merge import Merge
from resilient.errors import ErrorKind
from resilient.format.layout import Attempt
from resilient.policy.keep import Keep
from resilient.store.base import Store
from resilient.testing.cluster import BrokenPromiseError, Cluster
from resilient.testing.simulation import life as lives
from resilient.testing.simulation.faults import Chances, Fate, Fates, Script, What
from resilient.testing.simulation.life import Life, Plan, Stage
from resilient.testing.simulation.scheduling import Machine, Process, Scheduler
from resilient.testing.simulation.state import Sick
from resilient.testing.simulation.storing import Disk
from resilient.testing.simulation.witness import Witness
from tests.figures import Figures

Count = Callable[[int, int], int]
Make = Callable[[str, str], Figures]


def run_all(rounds: Figures, schedules: int, world_size: int, *, first: int = 0, every: int = 1) -> None:
    """Run one seed after another, from where an interrupted proof was; a broken promise tells its seed."""
    for number in range(len(rounds), schedules):
        seed = first + every * number
        started_s = time.process_time()
        held = Cluster(seed=seed, world_size=world_size).run()
        rounds.add(
            seed=seed,
            generations=held.generations,
            commits=held.commits,
            torn=held.torn,
            deaths=held.deaths,
            operations=held.operations,
            virtual_s=round(held.virtual_s),
            cpu_s=round(time.process_time() - started_s, 3),
        )


@pytest.mark.proof
@pytest.mark.parametrize(("world_size", "few"), [(1, 20), (3, 60), (16, 4)])
def test_small_clusters_hold_whatever_fails(world_size: int, few: int, count: Count, figures: Make) -> None:
    title = f"Simulated schedules at {world_size} ranks: false commits, lost steps: none"
    run_all(figures(f"simulated-{world_size:04}", title), count(few, 1000), world_size)


HALVES = pytest.mark.parametrize("half", [0, 1], ids=["even", "odd"])
"""The seeds of a full proof, in two tests, so that two processes can share them."""


@pytest.mark.proof
@HALVES
def test_64_ranks_hold_whatever_fails(half: int, count: Count, figures: Make) -> None:
    title = "Simulated schedules at 64 ranks with random deaths, delays and partitions: false commits, lost steps: none"
    run_all(figures(f"simulated-0064-{half}", title), count(1, 5_000), 64, first=half, every=2)


@pytest.mark.proof
@HALVES
def test_thousands_of_ranks_hold_whatever_fails(half: int, count: Count, figures: Make) -> None:
    title = "Simulated schedules at 4,096 ranks (128 in a quick run): false commits, lost steps: none"
    rounds = figures(f"simulated-4096-{half}", title)
    run_all(rounds, count(1, 50), count(128, 4096), first=half, every=2)


def test_a_seed_repeats_a_schedule_exactly() -> None:
    first, second = Cluster(seed=7, world_size=5), Cluster(seed=7, world_size=5)
    assert first.run() == second.run()
    assert first.trace() == second.trace()
    assert Cluster(seed=8, world_size=5).run() != Cluster(seed=7, world_size=5).run()


def test_without_faults_every_save_is_committed() -> None:
    held = Cluster(seed=1, world_size=4, chances=Chances.none(), lives=1).run()
    assert held.deaths + held.torn == 0
    assert held.generations == 2


# Planted bugs ---------------------------------------------------------------------------------------------------------


def without_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(self: Merge, numbers: object) -> object:
        self._renumber(numbers, np.zeros(3, np.int64))  # type: ignore[arg-type]
        chunks = self._rows.all()
        stored = np.flatnonzero(chunks.places.object >= 0)
        return stored[np.argsort(chunks.boxes.tensor[stored], kind="stable")].astype(np.int32)

    monkeypatch.setattr(Merge, "_counting", counting)


def with_the_highest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lines.read_line

    def read_line(store: Store) -> lines.Line:
        listed = [attempt for attempt, names in lines.list_attempts(store).items() if "TOMBSTONE" not in names]
        found = [commit for attempt in listed if (commit := committing.read_commit(store, attempt)) is not None]
        found.sort(key=lambda commit: (-commit.step, -commit.generation))
        return dataclasses.replace(real(store), commits=tuple(found))

    monkeypatch.setattr(lives, "read_line", read_line)


def without_recognizing_own_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: Disk, key: str, data: bytes, process: Process) -> bool:
        if key in self.objects:
            return False
        self.put(key, data, process)
        return True

    monkeypatch.setattr(Disk, "create", create)


def with_the_commit_before_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.testing.simulation.state import Part, State

    def write(self: State, store: Store, part: Part) -> None:
        committing.write_receipt(store, part.receipt)
        for key, data in part.objects.items():
            store.put(key, [data])

    monkeypatch.setattr(State, "write", write)


def with_listings_that_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "proposed", lambda store, generation, nonce: [])


def with_a_base_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "write_base", lambda store, claim, continues: None)


@pytest.mark.parametrize(
    ("plant", "within"),
    [
        (without_coverage, 20),
        (with_the_highest_step, 100),
        (without_recognizing_own_writes, 100),
        (with_the_commit_before_the_data, 20),
        (with_a_base_that_comes_late, 2),
        (with_listings_that_are_believed, 40),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seed, told = next(violations(within), (0, ""))
    assert f"Cluster(seed={seed}, world_size=3" in told, f"{within} schedules held with a bug planted"
    with pytest.raises(BrokenPromiseError) as again:
        Cluster(seed=seed, world_size=3).run()
    assert str(again.value) == told, "the same, operation by operation"


def violations(within: int) -> Iterator[tuple[int, str]]:
    """Yield the seeds of schedules in which a promise is broken, and what is told of them."""
    for seed in range(within):
        try:
            Cluster(seed=seed, world_size=3).run()
        except BrokenPromiseError as violation:
            yield seed, str(violation)


# One story at a time --------------------------------------------------------------------------------------------------


class Story:
    """A few lives, started by hand, in which one thing happens."""

    def __init__(self, fates: Fates | None = None, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler()
        self.witness = Witness(keep_last=2)
        self.disk = Disk(self.scheduler, self.witness)
        self.witness.disk = self.disk
        self.stage = Stage(
            scheduler=self.scheduler,
            disk=self.disk,
            witness=self.witness,
            fates=fates or Script(lambda *_: False, Fate(0.0), self.rng),
            rng=self.rng,
            keep=Keep(last=2),
            commit_timeout_s=30.0,
        )
        self.lives: list[Life] = []

    def life(self, name: str, world_size: int, **plan: object) -> Life:
        life = Life(self.stage, Plan(name=name, world_size=world_size, launch=f"of-{name}", **plan))  # type: ignore[arg-type]
        self.lives.append(life)
        life.start()
        return life

    def tell(self, script: Callable[[Process], None]) -> None:
        """Run a story: ``script`` is its launcher."""
        person = Process(self.scheduler, "launcher", Machine("login"), str, {})
        self.scheduler.spawn(person, lambda: script(person))
        with explained(self):
            self.scheduler.run()

    def until_over(self, person: Process) -> None:
        while not all(life.over for life in self.lives):
            person.sleep(0.5)

    def steps(self) -> list[tuple[int, int]]:
        """Return what counts: steps and generations, newest first."""
        return [(step, attempt.generation) for step, attempt in self.witness.counted().items()]


@contextmanager
def explained(story: Story) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(story.disk.trace())
        raise


@pytest.mark.parametrize("what", [What.DIES, What.DIES_AFTER, What.LOST, What.REFUSED, What.LATE])
def test_the_committer_fails_at_each_of_its_operations_and_the_step_is_committed(what: What) -> None:
    """Rank 0 dies at its N-th operation since it stored its receipt, for every N: another rank takes over."""
    for number in range(1, 200):
        begun = 0

        def is_it(process: Process, verb: str, key: str, number: int = number) -> bool:
            nonlocal begun
            if process.name != "a/0":
                return False
            begun += begun > 0 or (verb == "create" and "/receipts/" in key)
            return begun == number + 1  # the receipt itself is the first

        story = Story(script := Script(is_it, Fate(0.0, what, 5.0), random.Random(number)), seed=number)
        life = None

        def play(person: Process, story: Story = story) -> None:
            nonlocal life
            life = story.life("a", 4, steps=(10,))
            story.until_over(person)

        story.tell(play)
        assert life is not None
        assert story.steps() == [(10, 1)], (number, script.happened)
        assert life.committed == [10], (number, script.happened)
        if script.happened is None:
            assert number > 8, "a committer does at least this much"
            return
    pytest.fail("the committer never ends")


@pytest.mark.parametrize("name", ["COMMIT", "manifest-", "/receipts/", "data/"])
@pytest.mark.parametrize("stall_s", [8.0, 100.0, 350.0])
def test_a_zombie_of_an_older_launch_is_released_between_check_and_write(name: str, stall_s: float) -> None:
    """It stalls right before it writes; a later launch saves the same steps again, with other contents."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name.startswith("old/") and verb != "get" and name in key and "000000000020" in key

    story = Story(script := Script(is_it, Fate(0.0, What.STALLS, stall_s), random.Random(1)))

    def play(person: Process) -> None:
        story.life("old", 4, steps=(10, 20, 30))
        person.sleep(12)
        story.life("new", 3, steps=(10, 20))
        story.until_over(person)

    story.tell(play)
    assert script.happened is not None
    saved = story.lives[1].committed
    assert len(saved) == 2, story.lives[1].failed
    assert story.steps()[:2] == [(step, 2) for step in sorted(saved, reverse=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_zombie_of_the_same_launch_cannot_change_what_a_rollback_has_chosen(seed: int) -> None:
    """Step 20 is saved again from step 10; whoever still saves the first history is not seen."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "first/0" and verb == "create" and key.endswith("000000000030/COMMIT")

    story = Story(Script(is_it, Fate(0.0, What.STALLS, 60.0), random.Random(seed)), seed=seed)

    def play(person: Process) -> None:
        story.life("first", 2, steps=(10, 20, 30))
        person.sleep(14)
        story.life("second", 2, steps=(10,), back=1)
        story.until_over(person)

    story.tell(play)
    assert story.steps() == [(20, 2), (10, 1)]


def test_a_step_is_saved_again_on_another_number_of_ranks_after_a_torn_attempt() -> None:
    """A rank dies in the middle of its upload; the rest is replaced by fewer ranks, which save the same step."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "a/3" and verb == "put" and key.startswith("data/")

    story = Story(script := Script(is_it, Fate(0.0, What.DIES_AFTER), random.Random(0)))

    def play(person: Process) -> None:
        first = story.life("a", 4, steps=(10,))
        person.sleep(5)
        assert first.hurt
        first.leave(3)
        story.life("b", 3, steps=(10,))
        story.until_over(person)

    story.tell(play)
    assert script.happened is not None
    assert story.steps() == [(10, 2)]
    assert len([attempt for attempt in story.witness.parts if attempt.step == 10]) == 2


@pytest.mark.parametrize("key", ["generations/00000001.json", ".base.json", "COMMIT", "/receipts/"])
def test_a_lost_response_is_no_loss(key: str) -> None:
    story = Story(
        script := Script(lambda _, verb, what: verb == "create" and key in what, Fate(0.0, What.LOST), random.Random(0))
    )

    def play(person: Process) -> None:
        story.life("a", 3, steps=(10,))
        story.until_over(person)

    story.tell(play)
    assert script.happened is not None
    assert story.steps() == [(10, 1)]
    assert list(story.witness.claims) == [1]


@pytest.mark.parametrize(
    ("sick", "said"), [(Sick.DIVERGENT, ["'b'", "2"]), (Sick.HOLE, ["'w'", "2"])], ids=["divergent", "hole"]
)
def test_what_must_not_be_committed_is_refused_by_name(sick: Sick, said: list[str]) -> None:
    story = Story()
    life = None

    def play(person: Process) -> None:
        nonlocal life
        life = story.life("a", 3, steps=(10, 20), sick={0: sick})
        story.until_over(person)

    story.tell(play)
    assert life is not None
    assert story.steps() == [(20, 1)], "the next save is made as usual"
    assert any(all(part in message for part in said) for message in life.failed), life.failed


def test_two_committers_at_once_agree() -> None:
    """Rank 0 stalls right before COMMIT for longer than rank 1 waits; then both write."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "a/0" and verb == "create" and key.endswith("COMMIT")

    story = Story(script := Script(is_it, Fate(0.0, What.STALLS, 10.0), random.Random(0)))

    def play(person: Process) -> None:
        story.life("a", 4, steps=(10,))
        story.until_over(person)

    story.tell(play)
    assert script.happened is not None
    (commit,) = story.witness.commits.values()
    assert commit.committer == 1
    assert story.lives[0].committed == [10]
    assert not story.lives[0].failed


def test_a_life_that_stalled_before_it_chose_does_not_continue_a_later_one() -> None:
    """What it saved would be seen by nobody: it has to hear that it was taken over. (Found by seed 5546 at 3 ranks.)"""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "old/0" and verb == "list" and key == "steps/"

    story = Story(script := Script(is_it, Fate(0.0, What.STALLS, 60.0), random.Random(0)))

    def play(person: Process) -> None:
        story.life("old", 2, steps=(10,))
        person.sleep(5)
        story.life("new", 2, steps=(10, 20))
        story.until_over(person)

    story.tell(play)
    assert script.happened is not None
    old = story.lives[0]
    assert old.refused is not None
    assert old.refused.kind is ErrorKind.TAKEN_OVER
    assert list(story.witness.bases) == [2]
    assert story.steps() == [(20, 2), (10, 2)]


def test_writers_of_a_job_that_was_killed_do_not_all_read_all_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trainers died together, so they leave together. (Found at 4,096 ranks, seed 6: sixteen million reads.)"""
    merges: Counter[Attempt] = Counter()
    merged = committing.merged

    def counted(store: Store, attempt: Attempt, world_size: int) -> object:
        merges[attempt] += 1
        return merged(store, attempt, world_size)

    monkeypatch.setattr(committing, "merged", counted)
    Cluster(seed=21, world_size=128).run()
    assert 0 < max(merges.values()) < 20  # 94, when each tried at its own deadline


def test_a_zombie_that_prunes_cannot_take_what_a_rollback_continues_from() -> None:
    """It stalls right before the TOMBSTONE of a step; a later life goes back to that step, and has not saved yet."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "first/0" and verb == "create" and key.endswith("TOMBSTONE")

    story = Story(script := Script(is_it, Fate(0.0, What.STALLS, 10.0), random.Random(0)))

    def play(person: Process) -> None:
        story.life("first", 2, steps=(10, 20, 30))
        while script.happened is None:
            person.sleep(0.5)
        story.life("second", 2, steps=(30,), back=2, spread_s=60.0)
        while not any(key.endswith("TOMBSTONE") for key in story.disk.objects):
            person.sleep(0.5)
        assert list(story.witness.bases) == [1, 2], "it lands after the base, and before the first save"
        assert [commit.step for commit in lines.read_line(story.stage.store(person)).commits] == [10]
        story.until_over(person)

    story.tell(play)
    assert (10, 1) in story.steps()


def test_what_a_rollback_continues_from_goes_once_its_own_line_does_not_need_it() -> None:
    """The TOMBSTONE of the past is void; the later life, which keeps two, gives the step up under a name of its own."""

    def is_it(process: Process, verb: str, key: str) -> bool:
        return process.name == "first/0" and verb == "create" and key.endswith("TOMBSTONE")

    story = Story(script := Script(is_it, Fate(0.0, What.STALLS, 10.0), random.Random(0)))

    def play(person: Process) -> None:
        story.life("first", 2, steps=(10, 20, 30))
        while script.happened is None:
            person.sleep(0.5)
        story.life("second", 2, steps=(10, 20, 30, 40), back=2, interval_s=15.0)
        story.until_over(person)

    story.tell(play)
    assert story.steps() == [(50, 2), (40, 2)]
    left = [key.rpartition("/")[2] for key in story.disk.objects if key.startswith("steps/000000000010/")]
    assert left == ["TOMBSTONE", "TOMBSTONE-00000002"]


def test_a_restart_whose_listing_is_stale_continues_from_the_newest() -> None:
    """Whoever commits dies at once; the next life lists what was there some seconds before."""

    class Stale(random.Random):
        def random(self) -> float:
            return 0.999  # as stale as it may be, and as slow

    story = Story(script := Script(lambda *_: False, Fate(0.0), random.Random(0)))
    story.disk.lags = True

    def play(person: Process) -> None:
        first = story.life("first", 2, steps=(10, 20))
        while len(story.witness.commits) < 2:
            person.sleep(0.01)
        first.kill()
        story.stage.rng.random = Stale().random  # type: ignore[method-assign]
        story.life("second", 2, steps=(10,))
        story.until_over(person)

    story.tell(play)
    assert script.happened is None
    assert story.steps() == [(30, 2), (20, 1)]
