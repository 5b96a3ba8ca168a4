"""One life of a group of ranks: it claims, chooses, and saves, by the code that a training runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random  # noqa: TID251 -- the type alone: callers pass a seeded one

from resilient.catalog.contents import read_manifest
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.launch import INTERVAL_S, Heartbeat, check_no_other_launch
from resilient.catalog.line import read_line
from resilient.catalog.marks import reading
from resilient.catalog.run_info import open_run
from resilient.errors import ErrorKind, NotFoundError, ResilientError, StoreError
from resilient.format.documents import Claim, Commit
from resilient.format.layout import Attempt
from resilient.policy.keep import Keep
from resilient.store.retrying import Retrying
from resilient.testing.simulation.faults import Fates
from resilient.testing.simulation.scheduling import Machine, Process, Scheduler
from resilient.testing.simulation.state import Sick, State
from resilient.testing.simulation.storing import Disk, SimulatedStore
from resilient.testing.simulation.witness import Witness
from resilient.writer.messages import Answer, Committed, Failed, Open, Save
from resilient.writer.worker import Worker

RANKS_PER_MACHINE = 8
CALL_TIMEOUT_S = 20.0
"""How long a call to the store goes on trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all lives of one simulation share."""

    scheduler: Scheduler
    disk: Disk
    witness: Witness
    fates: Fates
    rng: Random
    keep: Keep
    commit_timeout_s: float
    processes: dict[str, Process] = field(default_factory=dict)

    def process(self, name: str, machine: Machine) -> Process:
        return Process(self.scheduler, name, machine, lambda: f"{self.rng.getrandbits(64):016x}", self.processes)

    def store(self, process: Process) -> Retrying:
        """Return the way of a process to the store, as `open_store` makes it."""
        store = SimulatedStore(self.disk, process, self.fates, self.rng)
        return Retrying(store, clock=process, timeout_s=CALL_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a life does unless it is hindered.

    ``steps`` are counted from the one that it continues from, every ``interval_s`` one save; ranks are apart by up to
    ``spread_s``. ``back``: it continues from so many checkpoints before the newest, as after a rollback. ``sick``: what
    is wrong with which save.
    """

    name: str
    launch: str
    world_size: int
    steps: Sequence[int] = (10, 20)
    interval_s: float = 8.0
    takeover: bool = True
    spread_s: float = 1.0
    back: int = 0
    sick: dict[int, Sick] = field(default_factory=dict)


class SimulatedWriter(Worker):
    """A writer whose state is not staged, but made up; all that follows is what any writer does."""

    def __init__(self, life: Life, rank: int, opened: Open, say: Callable[[Answer], None]) -> None:
        process = life.ranks[rank]
        store = life.stage.store(process)
        super().__init__(store, opened, (), say, clock=process)
        self._life = life
        self._rank = rank
        self._upload = life.stage.store(process)
        self.state = State(rank=rank, world_size=life.plan.world_size, history=life.plan.name)

    def _persist(self, order: Save, attempt: Attempt) -> None:
        life = self._life
        witness = life.stage.witness
        sick = life.plan.sick.get(order.structure)
        if sick is not None:
            witness.sick[attempt] = sick
        part = self.state.part(self._upload, attempt, sick)
        witness.parts[attempt][self._rank] = part
        self.state.write(self._upload, part)


class Life:
    """The ranks of one generation.

    Each rank is one process: the trainer's part and the writer's. When the trainers are ended, the writers go on until
    what was ordered is saved, as they do in a training.
    """

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage = stage
        self.plan = plan
        machines = [
            Machine(f"{plan.launch}-{number}")
            for number in range((plan.world_size + RANKS_PER_MACHINE - 1) // RANKS_PER_MACHINE)
        ]
        self.ranks = [
            stage.process(f"{plan.name}/{rank}", machines[rank // RANKS_PER_MACHINE]) for rank in range(plan.world_size)
        ]
        self.claim: Claim | None = None
        self.continued: Commit | None = None
        self.refused: ResilientError | None = None
        self.committed: list[int] = []
        self.failed: list[str] = []
        self._writers: dict[int, SimulatedWriter] = {}
        self._working: set[int] = set()
        self._started = False
        self._left = False

    def start(self) -> None:
        """Let rank 0 open the run, and all ranks train then."""
        self._working.add(0)
        self.stage.scheduler.spawn(self.ranks[0], self._open)

    @property
    def over(self) -> bool:
        """Whether nobody is left who does anything."""
        return all(self.ranks[rank].dead for rank in self._working)

    @property
    def hurt(self) -> bool:
        """Whether a launcher would notice that a process of the group has died."""
        return any(process.dead for process in self.ranks)

    def leave(self, survivors: int) -> None:
        """End the trainers; of their writers, those of so many ranks finish what was ordered."""
        self._left = True
        lost = len(self.ranks) - survivors
        for process in self.stage.rng.sample(self.ranks, max(0, lost)):
            process.die()
        for writer in self._writers.values():
            writer.leave()

    def kill(self) -> None:
        """End every process of the group at once."""
        self._left = True
        for process in self.ranks:
            process.die()

    # Opening ----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        process, plan = self.ranks[0], self.plan
        store = self.stage.store(process)
        try:
            check_no_other_launch(store, launch=plan.launch, takeover=plan.takeover, clock=process)
            open_run(store, create=True, clock=process)
            claim = claim_generation(
                store, world_size=plan.world_size, launch=plan.launch, heartbeat=True, clock=process
            )
            self.claim = claim
            self.stage.scheduler.spawn(process, lambda: self._beat(Heartbeat(store, plan.launch, clock=process)))
            self.continued = self._choose(store, process)
            write_base(store, claim, self.continued)
        except ResilientError as error:
            self._not_started(error)
        else:
            self._started = True
            self._train_all(claim)
        finally:
            if not self._started:
                self._working.discard(0)

    def _choose(self, store: Retrying, process: Process) -> Commit | None:
        """Return what to continue from, having read it as a restore does."""
        witness = self.stage.witness
        since_s = process.monotonic()
        line = read_line(store)
        newest = line.commits[0] if line.commits else None
        witness.chose(process.name, None if newest is None else newest.attempt, since_s=since_s)
        if newest is None:
            return None
        chosen = line.commits[min(self.plan.back, len(line.commits) - 1)]
        with reading(store, chosen, process):
            witness.readers[chosen.attempt].append(process)
            try:
                manifest = read_manifest(store, chosen)
                for each in manifest.objects[:: max(1, len(manifest.objects) // 8)]:
                    store.get(each.key)
            finally:
                witness.readers[chosen.attempt].remove(process)
        return chosen

    def _not_started(self, error: ResilientError) -> None:
        self.refused = error
        away = isinstance(error, StoreError) and error.retryable
        expected = error.kind in {ErrorKind.TAKEN_OVER, ErrorKind.NO_SUCH_STEP} or (
            error.kind is ErrorKind.RUN_IN_USE and not self.plan.takeover
        )
        if not away and not expected:
            self.stage.witness.fail(f"{self.ranks[0].name} cannot start: {error!r}")
        if isinstance(error, NotFoundError) and self.continued is not None:
            self.stage.witness.fail(f"{self.ranks[0].name} cannot read what counts: {error}")

    def _beat(self, heartbeat: Heartbeat) -> None:
        while not self._left and not self.over:
            heartbeat.beat()
            self.ranks[0].sleep(INTERVAL_S)

    # Training ---------------------------------------------------------------------------------------------------------

    def _train_all(self, claim: Claim) -> None:
        for rank, process in enumerate(self.ranks):
            if not process.dead:
                opened = Open(
                    url=SimulatedStore.url,
                    options={},
                    run_id="simulated",
                    rank=rank,
                    world_size=self.plan.world_size,
                    generation=claim.generation,
                    nonce=claim.nonce,
                    commit_timeout_s=self.stage.commit_timeout_s,
                    keep=self.stage.keep,
                    compress="off",
                )
                self._writers[rank] = SimulatedWriter(self, rank, opened, _Ears(self, rank, claim))
                self._working.add(rank)
                self.stage.scheduler.spawn(
                    process, self._training(rank), after_s=self.stage.rng.random() * self.plan.spread_s
                )

    def _training(self, rank: int) -> Callable[[], None]:
        def train() -> None:
            process, plan = self.ranks[rank], self.plan
            start_s = process.monotonic()
            first = 0 if self.continued is None else self.continued.step
            try:
                for number, step in enumerate(plan.steps):
                    until_s = start_s + number * plan.interval_s
                    if until_s > process.monotonic():
                        process.sleep(until_s - process.monotonic())
                    if self._left:
                        break
                    order = Save(structure=number, slot=0, sequence=0, step=first + step, reason="simulated", values=())
                    self._writers[rank].save(order)
            finally:
                self._working.discard(rank)

        return train

    def heard(self, rank: int, attempt: Attempt, answer: Answer) -> None:
        """Take note of what a writer says."""
        who = self.ranks[rank].name
        if isinstance(answer, Committed):
            self.stage.witness.heard(who, attempt, rank=rank)
            self._writers[rank].state.committed(attempt)
            if attempt.step not in self.committed:
                self.committed.append(attempt.step)
        elif isinstance(answer, Failed):
            self.failed.append(answer.error.message)
            self.stage.witness.failed(who, attempt, answer.error.kind, answer.error.message)
            if not answer.persisted and self.stage.rng.random() < 0.5:
                for writer in self._writers.values():
                    writer.abandon(attempt.step, f"{who} cannot save it: {answer.error.message}")


@dataclass(frozen=True, slots=True)
class _Ears:
    """A trainer, who hears what its writer says."""

    life: Life
    rank: int
    claim: Claim

    def __call__(self, answer: Answer) -> None:
        if isinstance(answer, Committed | Failed):
            attempt = Attempt(step=answer.step, generation=self.claim.generation, nonce=self.claim.nonce)
            self.life.heard(self.rank, attempt, answer)
