"""A guard on the numbers of each step: sick ones are run again, and skipped, rolled back or told, as the program wants.

It acts before the optimizer steps, so that no state has been touched when a step is run again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, SupportsFloat, TypeVar

import torch
import torch.distributed as dist

from resilient import events
from resilient.config import Settings
from resilient.policy.numerics import Suspicion, Usual, judge
from resilient.run.misuse import misused
from resilient.run.sampler import ElasticSampler
from resilient.state.items import unwrapped
from resilient.state.rng import Rng

T = TypeVar("T")

Agree = Callable[[Sequence[int]], Sequence[int]]

_NO_RANK: Final = -(1 << 62)


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
        self._suspects: tuple[int, ...] = ()
        self._asked: bool | None = None  # whether the program ever asks; None: not known yet
        self._again = False
        self._rolls_back = False
        self.skips = False
        """Whether the samples of this batch are to be left out."""

    def tries(self, batch: T, rng: Rng, *, step: int, stepped: Callable[[], bool]) -> Iterator[T]:
        """Yield a batch as often as it has to be taken, each time with the same random numbers.

        ``step`` are complete; ``stepped`` says whether an optimizer has stepped since.

        Raises:
            UsageError: it has, although it was told not to.
        """
        self._step, self._tries, self._before = step, 0, b""
        self._again = self.skips = False
        before = rng.snapshot() if self._asked is not False else {}
        yield batch
        self._asked = bool(self._asked)
        while self._wants_again(stepped=stepped()):
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
        """Return the samples that the next life is not to use: where each sampler is, if the run is rolled back."""
        samplers = {name: unwrapped(item) for name, item in items.items() if self._rolls_back}
        return {
            name: (each.epoch, each.consumed) for name, each in samplers.items() if isinstance(each, ElasticSampler)
        }

    def watch(self, values: dict[str, SupportsFloat], samplers: Sequence[ElasticSampler]) -> bool:
        """Return whether the step may be taken; see `Run.watch`."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._asked, self._again = True, False
        mine, words = self._usual.suspect(numbers)
        bits = struct.pack(f"<{len(numbers)}d", *numbers.values())
        suspect = self._rank if mine else _NO_RANK
        told = self._agree([mine, suspect, -suspect if mine else _NO_RANK, bits != self._before])
        worst, outcome = Suspicion(told[0]), judge(Suspicion(told[0]), tries=self._tries, changed=bool(told[3]))
        if worst:
            self._suspects = tuple(sorted({-told[2], told[1]}))
        self._before = bits
        if outcome == "healthy":
            self._usual.accept(numbers)
            return True
        if outcome == "run again":
            self._tries += 1
            self._again = True
            return False
        act = "go on" if outcome == "transient" else self._act_on[worst]
        if act in ("skip", "rollback") and not samplers:
            raise misused(
                "the samples of a sick step cannot be left out: their order is not that of an ElasticSampler",
                'track an ElasticSampler, or set on_nonfinite="stop"',
            )
        self._bus.emit(
            events.NumericFault(
                rank=self._rank,
                step=self._step + 1,
                outcome=outcome,
                ranks=self._suspects,
                what=words,
                reruns=self._tries,
                action=act,
            )
        )
        if outcome == "transient":
            self._usual.accept(numbers)
        if act in ("stop", "rollback"):
            self._rolls_back = act == "rollback"
            raise self._sick(outcome, words)
        self.skips = act == "skip"
        return not self.skips

    def _sick(self, outcome: str, words: str) -> FloatingPointError:
        where = words or f"on rank {', '.join(map(str, self._suspects))} a value is suspicious"
        again = (
            "again, bit by bit, when it was run once more" if outcome == "reproducible" else "and not twice the same"
        )
        return FloatingPointError(f"{where} in step {self._step + 1}, {again}")


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
