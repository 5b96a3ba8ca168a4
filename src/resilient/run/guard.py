"""A guard on the numbers of each step: sick ones are run again, and skipped, rolled back or told, as the program wants.

It acts before the optimizer steps, so that no state has been touched when a step is run again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, SupportsFloat, TypeVar

import torch
import torch.distributed as dist

from resilient import events
from resilient.config import Settings
from resilient.policy.numerics import SPIKE, Outcome, Suspicion, Usual, judge
from resilient.run.boundary import BoundaryWatch
from resilient.run.misuse import misused
from resilient.run.sampler import ElasticSampler
from resilient.state.items import unwrapped
from resilient.state.rng import Rng

T = TypeVar("T")

Agree = Callable[[Sequence[int]], Sequence[int]]

_NOBODY: Final = -(1 << 62)


_SHOWN: Final = {
    "reproducible": "again, bit by bit, when it was run once more",
    "unstable": "and not twice the same",
    "not run again": "which could not be run again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What all ranks together have seen, the same on each: the worst, the name of that value, and on which ranks."""

    worst: Suspicion = Suspicion.NONE
    name: str = ""
    ranks: tuple[int, ...] = ()
    changed: bool = False

    @property
    def words(self) -> str:
        how = "is not finite" if self.worst is Suspicion.NON_FINITE else f"is more than {SPIKE:g} times what is usual"
        where = " to ".join(map(str, self.ranks))
        return f"{self.name} {how} on rank {where}"


class Guard:
    """What `Run.watch` asks. `tries` are the times that a turn gets its batch; `skips` says what became of it."""

    def __init__(self, settings: Settings, *, rank: int, bus: events.Bus, agree: Agree | None = None) -> None:
        """``agree``: returns the largest of each number over all ranks; all of them call it alike."""
        self._act_on = {Suspicion.NON_FINITE: settings.on_nonfinite, Suspicion.SPIKE: settings.on_spike}
        self._rank = rank
        self._bus = bus
        self._agree = largest_of_all if agree is None else agree
        self._usual = Usual()
        self._tries = 0
        self._before = b""
        self._step = 0
        self._seen = _Seen()
        self._asked: bool | None = None  # whether the program ever asks; None: not known yet
        self._may_rerun = False
        self._again = False
        self._rolled_back: Sequence[ElasticSampler] = ()
        self.skips = False
        """Whether the samples of this batch are to be left out."""

    def tries(self, batch: T, rng: Rng, *, step: int, watch: BoundaryWatch) -> Iterator[T]:
        """Yield a batch as often as it has to be taken, each time with the same random numbers.

        ``step`` are complete. ``watch`` says whether gradients are pending, and whether an optimizer has stepped.

        Raises:
            UsageError: it has, although it was told not to.
        """
        self._step, self._tries, self._before = step, 0, b""
        self._again = self.skips = False
        before = rng.snapshot() if self._asked is not False else None
        # Gradients of earlier turns would be lost with those of this one.
        self._may_rerun = before is not None and not watch.pending()
        yield batch
        self._asked = bool(self._asked)
        while self._wants_again(stepped=watch.stepped):
            assert before is not None, "else no re-run was asked for"
            rng.restore(before, step=step, rank=self._rank)
            yield batch

    def _wants_again(self, *, stepped: bool) -> bool:
        again, self._again = self._again, False
        if stepped and (again or self.skips):
            raise misused(
                f"run.watch has returned False in step {self._step + 1}, and the optimizer has stepped all the same",
                "write: if not run.watch(loss=loss): optimizer.zero_grad(); continue",
            )
        return again

    def left_out(self, items: Mapping[str, object]) -> dict[str, tuple[int, int]]:
        """Return the samples that the next life is not to use: where the samplers of the pass are, at a roll-back."""
        return {
            name: (each.epoch, each.consumed)
            for name, item in items.items()
            if isinstance(each := unwrapped(item), ElasticSampler)
            and any(each is rolled_back for rolled_back in self._rolled_back)
        }

    def watch(self, values: dict[str, SupportsFloat], samplers: Sequence[ElasticSampler]) -> bool:
        """Return whether the step may be taken; see `Run.watch`."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._asked, self._again = True, False
        bits = struct.pack(f"<{len(numbers)}d", *numbers.values())
        seen = self._agreed(numbers, changed=bits != self._before)
        self._before = bits
        outcome = judge(seen.worst, tries=self._tries, changed=seen.changed)
        if seen.worst:
            self._seen = seen
        if outcome == "run again" and not self._may_rerun:
            outcome = "not run again"
        if outcome == "run again":
            self._tries += 1
            self._again = True
            return False
        act = self._act(outcome, seen.worst, samplers)
        if outcome != "healthy":
            self._tell(outcome, act)
        if act in ("go on", "report"):
            self._usual.accept(numbers)  # a spike that stays is what is usual from now on
            return True
        if act == "skip":
            self.skips = True
            return False
        self._rolled_back = samplers if act == "rollback" else ()
        raise FloatingPointError(f"{self._seen.words} in step {self._step + 1}, {_SHOWN[outcome]}")

    def _act(self, outcome: Outcome, worst: Suspicion, samplers: Sequence[ElasticSampler]) -> str:
        if outcome in ("healthy", "transient"):
            return "go on"
        act = self._act_on[worst]
        if act in ("skip", "rollback"):
            if not samplers:
                raise misused(
                    "the samples of a sick step cannot be left out: their order is not that of an ElasticSampler",
                    'track an ElasticSampler, or set on_nonfinite="stop"',
                )
            if outcome == "not run again":
                return "stop"  # the samples of earlier turns are in the gradients, too
        return act

    def _agreed(self, numbers: dict[str, float], *, changed: bool) -> _Seen:
        """Return what all ranks together have seen: one all-reduce, in which each number is the largest of all."""
        suspicions = [self._usual.suspect({name: value})[0] for name, value in numbers.items()]
        mine = max(suspicions, default=Suspicion.NONE)
        first = next((index for index, each in enumerate(suspicions) if each is mine), 0)
        # The gradients are sick on all ranks once those of one are: the value that is named first tells whose it was.
        local = bool(suspicions and suspicions[0])
        told = self._agree(
            [mine, -first if mine else _NOBODY, int(changed)]
            + [number if flag else _NOBODY for flag in (local, bool(mine)) for number in (self._rank, -self._rank)]
        )
        worst, index, any_changed, *ranks = told
        highest, lowest = ranks[:2] if ranks[0] != _NOBODY else ranks[2:]
        suspects = tuple(sorted({-lowest, highest})) if worst else ()
        name = list(numbers)[-index] if worst else ""
        return _Seen(worst=Suspicion(worst), name=name, ranks=suspects, changed=bool(any_changed))

    def _tell(self, outcome: Outcome, act: str) -> None:
        self._bus.emit(
            events.NumericFault(
                rank=self._rank,
                step=self._step + 1,
                outcome=outcome,
                ranks=self._seen.ranks,
                what=self._seen.words,
                reruns=self._tries,
                action=act,
            )
        )


def largest_of_all(values: Sequence[int]) -> Sequence[int]:
    """Return the largest of each number over all ranks: one small all-reduce."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    device = "cpu" if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    tensor = torch.tensor(list(map(int, values)), dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found: list[int] = tensor.tolist()
    return found


def _number(name: str, value: SupportsFloat) -> float:
    if getattr(value, "numel", lambda: 1)() != 1 or not hasattr(value, "__float__"):
        raise misused(f"run.watch({name}={type(value).__name__}) is no number", "pass a float or a scalar")
    detached: SupportsFloat = value.detach() if isinstance(value, torch.Tensor) else value
    return float(detached)
