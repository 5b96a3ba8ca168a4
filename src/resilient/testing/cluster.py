"""A simulated cluster: thousands of ranks in one thread, which run the real protocol while everything fails.

Every rank runs the code that a training runs: it claims a generation, reads the line, writes its base, stores its
data and its receipt, commits, takes over from a committer that died, proves, and prunes. What is simulated is what is
around it: time, which passes at once when everybody waits; the store, in which each operation lets the others go on
and may be delayed, refused, lost, or land when its client has long given up; and the fate of processes, which die,
stall for minutes and go on, are cut off, and are replaced by a later life while they still run.

A seed decides everything. So a failure can be looked at again:

    Cluster(seed=1234, world_size=64).run()

Needs the package ``greenlet`` (the extra ``testing``).
"""

from __future__ import annotations

import random  # noqa: TID251 -- seeded by the caller; see `_repeatable`
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from resilient.catalog.line import read_line
from resilient.policy.keep import Keep
from resilient.testing.simulation.faults import Chances, Fates, RandomFates
from resilient.testing.simulation.life import Life, Plan, Stage
from resilient.testing.simulation.scheduling import Machine, Process, Scheduler
from resilient.testing.simulation.state import Sick
from resilient.testing.simulation.storing import STALE_S, Disk
from resilient.testing.simulation.witness import Halt, Witness

_KEEP_LAST: Final = 2
_MANY: Final = 64
_COMMIT_TIMEOUT_S: Final = 12.0
_COMMIT_TIMEOUT_OF_MANY_S: Final = 5.0
"""Of many ranks a few take over even so; while they wait in vain, they only ask whether it is committed."""
_LOOK_S: Final = 0.5
_LIFE_S: Final = 300.0


class BrokenPromiseError(AssertionError):
    """A promise was broken. The message has the seed, the promise, and the last operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happened in one simulation that broke nothing.

    ``steps``: what counts in the end, newest first. ``commits``: attempts that were committed, whether they count or
    not; ``torn``: those that never were. ``deaths``: processes that died of themselves. ``virtual_s``: how long it
    took in there.
    """

    seed: int
    lives: int
    generations: int
    steps: tuple[int, ...]
    commits: int
    torn: int
    deaths: int
    operations: int
    virtual_s: float


class Cluster:
    """A run with a few lives of many ranks, all of which is drawn from a seed.

    Args:
        seed: decides everything: who goes on when, what fails, who dies, how lives follow each other.
        world_size: of the first life; later ones have as many or fewer.
        chances: how often what fails.
        lives: at most so many, besides a last one, without faults, that shows that the run goes on.
        fates: what befalls operations, in place of ``chances``.
    """

    def __init__(
        self,
        *,
        seed: int,
        world_size: int = 64,
        chances: Chances | None = None,
        lives: int = 3,
        fates: Fates | None = None,
    ) -> None:
        self.seed = seed
        self._world_size = world_size
        self._lives = lives
        self._rng = random.Random(seed)  # noqa: S311 -- it draws faults
        self._scheduler = Scheduler()
        self._witness = Witness(keep_last=_KEEP_LAST)
        self._disk = Disk(self._scheduler, self._witness, lags=self._rng.random() < 0.5)
        self._witness.disk = self._disk
        timeout_s = _COMMIT_TIMEOUT_S if world_size < _MANY else _COMMIT_TIMEOUT_OF_MANY_S * max(1.0, world_size / 1024)
        self._stage = Stage(
            scheduler=self._scheduler,
            disk=self._disk,
            witness=self._witness,
            fates=fates or RandomFates(chances or Chances(), self._rng, world_size),
            rng=self._rng,
            keep=Keep(last=_KEEP_LAST),
            commit_timeout_s=timeout_s,
        )
        self._lived: list[Life] = []
        self._launch = 0

    def run(self) -> Schedule:
        """Run it to its end.

        Raises:
            BrokenPromiseError: a promise was broken.
        """
        person = Process(self._scheduler, "launcher", Machine("login"), str, {})
        self._scheduler.spawn(person, lambda: self._launch_all(person))
        with _repeatable(self.seed):
            try:
                self._scheduler.run()
            except Halt as halt:
                raise BrokenPromiseError(self._told(str(halt))) from None
        attempts = set(self._witness.parts)
        return Schedule(
            seed=self.seed,
            lives=len(self._lived),
            generations=len(self._witness.claims),
            steps=tuple(self._witness.counted()),
            commits=len(self._witness.ever_committed),
            torn=len(attempts - self._witness.ever_committed),
            deaths=sum(process.dead for process in self._stage.processes.values()),
            operations=sum(process.operations for process in self._stage.processes.values()),
            virtual_s=self._scheduler.now_s,
        )

    def trace(self) -> str:
        """Return the last operations: when in virtual time, who, what, and how it went."""
        return self._disk.trace()

    def _told(self, what: str) -> str:
        call = f"Cluster(seed={self.seed}, world_size={self._world_size}, lives={self._lives}).run()"
        return f"{what}\n\nagain: {call}\n\nthe last operations:\n{self.trace()}"

    # The launcher: who starts lives, and how they end -----------------------------------------------------------------

    def _launch_all(self, person: Process) -> None:
        rng = self._rng
        for number in range(rng.randint(1, self._lives)):
            life = Life(self._stage, self._plan(number))
            self._lived.append(life)
            life.start()
            self._outlast(person, life)
        while not all(life.over for life in self._lived):
            person.sleep(_LOOK_S)
        self._last(person)

    def _plan(self, number: int) -> Plan:
        rng = self._rng
        if number == 0 or rng.random() < 0.5:
            self._launch += 1
        world_size = self._world_size
        if number:
            world_size = max(1, int(world_size * rng.choice((1.0, 1.0, 0.75, 0.5, 0.25, 0.02))))
        few = self._world_size < _MANY
        saves = rng.choice((1, 2, 2, 3, 4) if few else (1, 1, 1, 2))
        sick = {rng.randrange(saves): rng.choice(list(Sick))} if world_size > 1 and rng.random() < 0.1 else {}
        return Plan(
            name=f"life{number}",
            launch=f"launch{self._launch}",
            world_size=world_size,
            steps=[10 * (each + 1) for each in range(saves)],
            interval_s=rng.choice((0.1, 2.0, 8.0)),
            spread_s=rng.choice((0.02, 0.02, 1.0 if few else 0.3)),
            takeover=rng.random() < 0.7,
            back=rng.choice((0, 0, 0, 1)),
            sick=sick,
        )

    def _outlast(self, person: Process, life: Life) -> None:
        """Wait until a life is over, or is given up: ended, killed, or left to go on as it likes."""
        rng = self._rng
        patience_s = rng.choice((1.0, 5.0, 20.0, _LIFE_S, _LIFE_S)) * (0.5 + rng.random())
        waited_s = 0.0
        while waited_s < patience_s and not life.over and not life.hurt:
            person.sleep(_LOOK_S)
            waited_s += _LOOK_S
        if life.over:
            return
        person.sleep(rng.random() * 3)
        how = rng.random()
        if how < 0.5:
            life.leave(rng.choice((1, 4, 16, self._world_size)))
        elif how < 0.75:
            life.kill()
        person.sleep(rng.random() * rng.choice((0.1, 5.0, 60.0)))

    def _last(self, person: Process) -> None:
        """See that the run goes on, now that nothing fails any more: a life starts, and what it saves counts."""
        witness = self._witness
        newest = witness.newest()
        plan = Plan(name="last", launch="last", world_size=min(4, self._world_size), steps=(10,))
        life = Life(self._stage, plan)
        for process in life.ranks:
            process.sound = True
        life.start()
        while not life.over:
            person.sleep(_LOOK_S)
        wanted = 10 + (0 if newest is None else newest.step)
        if life.refused is not None or life.committed != [wanted]:
            witness.fail(f"the run cannot go on: {life.refused!r}, committed {life.committed}, failed {life.failed}")
        reader = self._stage.process("reader", Machine("login"))
        reader.sound = True
        self._scheduler.spawn(reader, lambda: self._read_all(reader))

    def _read_all(self, reader: Process) -> None:
        """See that readers find what counts, and nothing else, and that all of it is there."""
        reader.sleep(STALE_S)
        found = {commit.step: commit.attempt for commit in read_line(self._stage.store(reader)).commits}
        if found != self._witness.counted():
            self._witness.fail(f"readers find {found}, and {self._witness.counted()} count")
        self._witness.check_there()


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Have what draws from Python's own generator, as waits between tries do, draw the same each time."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
