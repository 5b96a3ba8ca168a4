"""One training that saves while its steps are timed, in a process of its own: the program behind training_slowdown.py.

Two questions, two ways of timing. How much longer do the steps around one save take than undisturbed ones (--saves)?
How many steps a second are there with regular saves, and without, in stretches that take turns (--pairs)?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from children import done, ready_steady
from gpt import make_gpt_training
from measuring import GIB, MIB
from peers import CONTESTANTS, Contestant, meet_alone
from processes import adopt_orphans, cpu_s, cpu_s_of
from states import check_equal, some_names
from training_loops import KINDS, Training, make_training

import resilient
import resilient.events

OURS = "resilient"
DEADLINE_S = 600.0
_WARM_TURNS = 5
_QUIET_TURNS = 5  # undisturbed ones between two saves: what the disturbed ones are compared with


@dataclass(slots=True)
class Save:
    """A save in a loop: when it began, how long the call took, when it was durable (0: not yet)."""

    began_s: float
    blocked_s: float = 0.0
    durable_s: float = 0.0


class Saving(Protocol):
    """How a loop saves: resilient's run, or a peer."""

    def save(self, noted: Save) -> None:
        """Save the state of this boundary; return when training may go on; note when it is durable, later."""

    def fence(self) -> None:
        """Return when the state may change."""


class OwnSaving:
    """The run's own way: its fence is a hook of the optimizer."""

    def __init__(self, run: resilient.Run) -> None:
        self._run = run
        self._handle: resilient.SaveHandle | None = None
        self._waited_s: dict[int, float] = {}
        # The bus is no public name: what the engine itself says of its waits stands beside what is measured here.
        run._bus.subscribe(self._note)  # noqa: SLF001

    def save(self, noted: Save) -> None:
        self.check()
        begin_s = time.perf_counter()
        self._handle = self._run.save("benchmark")
        noted.blocked_s = time.perf_counter() - begin_s
        self._waited_s[self._handle.step] = 0.0  # a wait is told only if there is one
        self._handle.committed.add_done_callback(lambda _: _note_durable(noted))

    def fence(self) -> None:
        return

    def check(self) -> None:
        """Raise what went wrong in the last save."""
        if self._handle is not None:
            self._handle.wait(DEADLINE_S)

    @property
    def fence_s(self) -> list[float]:
        """How long each save held up its step at the fence, as the engine tells it."""
        return list(self._waited_s.values())

    def _note(self, event: resilient.events.Event) -> None:
        if isinstance(event, resilient.events.SaveFenced):
            self._waited_s[event.step] = event.waited_s


class PeerSaving:
    """A peer's way: the state is made into a dictionary, saved, and waited for by a thread."""

    def __init__(self, training: Training, contestant: Contestant) -> None:
        self._training = training
        self._contestant = contestant
        self._step = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread()

    def save(self, noted: Save) -> None:
        self.check()
        self._step += 1
        begin_s = time.perf_counter()
        self._contestant.state = self._training.state()
        self._contestant.save(self._step)
        noted.blocked_s = time.perf_counter() - begin_s
        self._thread = threading.Thread(target=self._wait, args=(noted,))
        self._thread.start()

    def fence(self) -> None:
        self._contestant.fence()

    def check(self) -> None:
        """Raise what went wrong in the last save; there is room for two."""
        if self._thread.ident is not None:
            self._thread.join(DEADLINE_S)
        if self._failure is not None:
            raise self._failure
        self._contestant.forget(self._step - 1)

    def close(self) -> None:
        self._contestant.close()

    def _wait(self, noted: Save) -> None:
        try:
            self._contestant.wait()
            _note_durable(noted)
        except BaseException as error:  # noqa: BLE001 -- thread main: the next save raises it
            self._failure = error


# --- two ways of timing -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SingleSaves:
    """Saves now and then, each in a quiet neighborhood; compares the steps around it with those."""

    wanted: int
    ends_s: list[float] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    _quiet: int = -_WARM_TURNS

    def begin_turn(self, saving: Saving) -> bool:
        """Save if it is time to; say whether the loop goes on."""
        self.ends_s.append(time.perf_counter())
        if self.saves and not self.saves[-1].durable_s:
            self._raise_if_late()
            self._quiet = -1  # the step in which the save ends is still a disturbed one
            return True
        self._quiet += 1
        if self._quiet < _QUIET_TURNS:
            return True
        if len(self.saves) == self.wanted:
            return False
        self.saves.append(Save(self.ends_s[-1]))
        saving.save(self.saves[-1])
        return True

    def report(self) -> dict[str, Any]:
        """Return what each save cost."""
        steps = list(zip(self.ends_s, self.ends_s[1:], strict=False))
        disturbed = [any(_touches(save, *step) for save in self.saves) for step in steps]
        quiet = [end - begin for (begin, end), bad in zip(steps, disturbed, strict=True) if not bad]
        return {
            "lost_s": [self._lost_s(save, steps, disturbed) for save in self.saves],
            "blocked_s": [save.blocked_s for save in self.saves],
            "durable_s": [save.durable_s - save.began_s for save in self.saves],
            "step_s": statistics.median(quiet[_WARM_TURNS:]),
        }

    def _lost_s(self, save: Save, steps: list[tuple[float, float]], disturbed: list[bool]) -> float:
        """Return how much longer the steps took while a save was under way than the quiet ones before and after it."""
        during = [place for place, step in enumerate(steps) if _touches(save, *step)]
        before = [place for place in range(during[0]) if not disturbed[place]][-_QUIET_TURNS:]
        after = [place for place in range(during[-1] + 1, len(steps)) if not disturbed[place]][:_QUIET_TURNS]
        quiet_s = statistics.median(steps[place][1] - steps[place][0] for place in before + after)
        return sum(steps[place][1] - steps[place][0] for place in during) - len(during) * quiet_s

    def _raise_if_late(self) -> None:
        if time.perf_counter() - self.saves[-1].began_s > DEADLINE_S:
            raise TimeoutError(f"save {len(self.saves)} is not durable after {DEADLINE_S:g} s")


def _touches(save: Save, begin_s: float, end_s: float) -> bool:
    return save.began_s < end_s and begin_s < save.durable_s


@dataclass(slots=True)
class Stretch:
    """So many steps in so many seconds, and the processor time of the trainer and of all its other processes."""

    saves: int
    steps: int
    seconds: float
    trainer_cpu_s: float
    other_cpu_s: float


class Stretches:
    """Training with saves at an interval and without, by turns; the order within a pair changes from pair to pair."""

    def __init__(self, pairs: int, every_s: float, saves: int) -> None:
        self._every_s = every_s
        self._saves = saves
        self._plan = [saving for pair in range(pairs) for saving in ((False, True) if pair % 2 else (True, False))]
        self._found: list[Stretch] = []
        self._under_way: list[Save] = []
        self._turns = 0
        self._begin: tuple[float, float, float] | None = None

    def begin_turn(self, saving: Saving) -> bool:
        """Save if it is time to; say whether the loop goes on."""
        self._turns += 1
        if self._begin is None:
            if self._turns <= _WARM_TURNS:
                return True
            if not self._under_way:  # the first save is another question
                self._under_way = [Save(time.perf_counter())]
                saving.save(self._under_way[0])
            if not self._under_way[-1].durable_s:
                return True
            self._start()
        assert self._begin is not None
        elapsed_s = time.perf_counter() - self._begin[0]
        wanted = self._saves if self._plan[0] else 0
        over = len(self._under_way) == wanted and all(save.durable_s for save in self._under_way)
        if over and elapsed_s >= self._every_s * self._saves:
            self._end(elapsed_s)
            if not self._plan:
                return False
            elapsed_s = 0.0
        if self._plan[0] and len(self._under_way) < self._saves and elapsed_s >= self._every_s * len(self._under_way):
            self._under_way.append(Save(time.perf_counter()))
            saving.save(self._under_way[-1])
        return True

    def report(self) -> dict[str, Any]:
        """Return the stretches, in pairs."""
        return {"stretches": [asdict(stretch) for stretch in self._found]}

    def _start(self) -> None:
        self._under_way = []
        self._turns = 0
        self._begin = (time.perf_counter(), *_cpu_s())

    def _end(self, elapsed_s: float) -> None:
        assert self._begin is not None
        trainer_s, other_s = _cpu_s()
        self._found.append(
            Stretch(
                saves=len(self._under_way),
                steps=self._turns,
                seconds=elapsed_s,
                trainer_cpu_s=trainer_s - self._begin[1],
                other_cpu_s=other_s - self._begin[2],
            )
        )
        del self._plan[0]
        self._start()


def _cpu_s() -> tuple[float, float]:
    trainer_s = cpu_s_of(os.getpid())
    return trainer_s, cpu_s(os.getpid()) - trainer_s


def _note_durable(save: Save) -> None:
    save.durable_s = time.perf_counter()


# --- the program ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=[OURS, *CONTESTANTS])
    parser.add_argument("--kind", choices=[*KINDS, "GPT"], required=True)
    parser.add_argument("--mib", type=int, required=True, help="size of the state")
    parser.add_argument("--work", type=float, default=2.0, help="forward and backward, in copies of the state")
    parser.add_argument("--saves", type=int, help="so many saves, far apart")
    parser.add_argument("--pairs", type=int, help="so many pairs of stretches with saves and without")
    parser.add_argument("--every-s", type=float, help="between two saves of a stretch")
    parser.add_argument("--saves-per-stretch", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    adopt_orphans()
    if args.kind == "GPT":
        training, copied_s = make_gpt_training(args.mib * MIB), 0.0
    else:
        training, copied_s = make_training(args.kind, args.mib * MIB, args.work)
    tensors = list(training.state().values())
    facts = {"copied_s": copied_s, "tensors": len(tensors), "gib": sum(each.nbytes for each in tensors) / GIB}
    timing = SingleSaves(args.saves) if args.saves else Stretches(args.pairs, args.every_s, args.saves_per_stretch)
    ready_steady()
    loop = train_with_run if args.name == OURS else train_with_peer
    report = loop(args.name, training, timing, args.folder)
    done()
    print(json.dumps(facts | report))


def train_with_run(_: str, training: Training, timing: SingleSaves | Stretches, folder: Path) -> dict[str, Any]:
    @resilient.train(folder / "run", every=10**9, keep=resilient.Keep(last=2))
    def main(run: resilient.Run) -> dict[str, Any]:
        # The average changes after the optimizer's step only, and is declared so: nobody else could know.
        items = dict(training.items)
        if "average" in items:
            items["average"] = resilient.AfterStep(items["average"])
        run.track(**items)
        saving = OwnSaving(run)
        _loop(training, timing, saving, run.steps(range(10**9)))
        saving.check()
        return timing.report() | {"fence_s": saving.fence_s}

    report = main()  # saves the last step, too
    newest, live = resilient.checkpoints(folder / "run")[0], training.state()
    for name in some_names({name: live[name] for name in live if name.startswith("model.")}):
        check_equal(name, newest.tensor(name), live[name])
    return report


def train_with_peer(name: str, training: Training, timing: SingleSaves | Stretches, folder: Path) -> dict[str, Any]:
    meet_alone(name)
    contestant = CONTESTANTS[name](training.state(), folder)
    saving = PeerSaving(training, contestant)
    _loop(training, timing, saving, range(10**9))
    saving.check()
    saving.save(Save(0.0))
    saving.check()
    contestant.check(saving._step, some_names(contestant.state))  # noqa: SLF001 -- one program
    saving.close()
    return timing.report()


def _loop(training: Training, timing: SingleSaves | Stretches, saving: Saving, steps: Any) -> None:
    for _ in steps:
        if not timing.begin_turn(saving):
            break
        training.turn(saving.fence)


if __name__ == "__main__":
    main()
