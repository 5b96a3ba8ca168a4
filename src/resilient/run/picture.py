"""What the steps of this rank are spent on.

Every turn tells how long it waited for its batch and its saves, and how long ``step`` of the optimizers took; only
what is not seen from outside, the exchange, is looked at in few steps, by torch's profiler. The profiler makes the
operators of a step slower, not its exchange. So the time of a step comes from turns that were not looked at, and what
is left of it after all else is what was computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Final, NamedTuple, TypeVar

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from resilient.clock import Clock
from resilient.events import Bus, Event, Notice, SaveFenced, SaveStarted, StepPicture, Tiered
from resilient.run.picture_profile import Profile
from resilient.run.picture_sampling import Looks
from resilient.run.picture_spans import Looked
from resilient.state.items import unwrapped

T = TypeVar("T")

_WARM_UP: Final = 5
"""Turns in each life that tell nothing of the others, as in `resilient.run.sections`."""

_FEW: Final = 5
_COMPARED: Final = 16
_MOST: Final = 10_000


class _Spent(NamedTuple):
    step_s: float
    data_s: float
    optimizer_s: float
    save_s: float


class Picture:
    """Follows the turns of one life of a rank; for the training thread, but for `take`.

    ``looks``: which turns are looked at; None if none shall be. Without looks there is a picture only of a rank that is
    ``alone``, which has no exchange.
    """

    def __init__(self, looks: Looks | None, *, rank: int, bus: Bus, clock: Clock, alone: bool = False) -> None:
        self._looks = None if alone else looks
        self._alone = alone
        self._rank = rank
        self._bus = bus
        self._clock = clock
        self._turns: deque[_Spent] = deque(maxlen=_MOST)
        self._looked: deque[Looked] = deque(maxlen=_MOST)
        self._tiers_s: deque[float] = deque(maxlen=_MOST)
        self._usual: deque[float] = deque(maxlen=_COMPARED)
        self._hooks: list[RemovableHandle] = []
        self._number = self._step = 0
        self._saved_step = -1
        self._began_s: float | None = None
        self._stepping_s: float | None = None
        self._data_s = self._optimizer_s = self._save_s = self._looking_s = 0.0
        self._profile: Profile | None = None
        self._is_ready = False
        self._close_bus = bus.subscribe(self._on_event)

    def follow(self, items: Mapping[str, object]) -> None:
        """Measure the steps of the optimizers among these items."""
        for item in items.values():
            if isinstance(optimizer := unwrapped(item), Optimizer):
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def begin(self, data_s: float, step: int) -> None:
        """Begin a turn that has waited for its batch for ``data_s``, after ``step`` complete ones."""
        self._number += 1
        self._step = step
        self._data_s = data_s
        self._optimizer_s = self._save_s = 0.0
        self._began_s = self._clock.monotonic()
        if self._looks is not None and len(self._usual) >= _FEW and self._looks.due(step):
            self._profile = self._tried(Profile.begin)
            self._looking_s = self._clock.monotonic() - self._began_s

    def end(self) -> None:
        """End it; what a save took of it is told apart."""
        if self._began_s is None:
            return
        profile, self._profile = self._profile, None
        ended_s = self._clock.monotonic()
        looked = None if profile is None else self._tried(profile.look)
        now_s = self._clock.monotonic()
        took_s = now_s - self._began_s - self._save_s
        self._looking_s += now_s - ended_s
        self._began_s = None
        if self._number <= _WARM_UP:
            return
        if profile is None:
            self._usual.append(took_s)
            self._turns.append(_Spent(took_s + self._data_s, self._data_s, self._optimizer_s, self._save_s))
        elif looked is not None:
            self._learn(looked, took_s)

    def drop(self) -> None:
        """Forget the turn that goes on: the loop was left in it."""
        profile, self._profile, self._began_s = self._profile, None, None
        if profile is not None:
            self._tried(profile.look)

    def take(self, *, least: int = _FEW) -> StepPicture | None:
        """Return the picture of the turns since this was called last; None, and they stay, if they are too few."""
        if len(self._turns) < least or not (self._looked or self._alone):
            return None
        turns = [self._turns.popleft() for _ in range(len(self._turns))]
        looked = [self._looked.popleft() for _ in range(len(self._looked))]
        exchange_s = median(each.exchange_s for each in looked) if looked else 0.0
        in_optimizer_s = median(each.optimizer_s for each in looked) if looked else 0.0
        on_device = [each.device_optimizer_s for each in looked if each.device_optimizer_s is not None]
        data_s = median(turn.data_s for turn in turns)
        tiers_s = sum(self._tiers_s.popleft() for _ in range(len(self._tiers_s)))
        save_s = fmean(turn.save_s for turn in turns) + tiers_s / len(turns)
        optimizer_s = max(0.0, (median(on_device or [turn.optimizer_s for turn in turns])) - in_optimizer_s)
        step_s = median(turn.step_s for turn in turns) + save_s
        # The steps that were looked at may have been slower ones: all parts are of the same step.
        exchange_s = min(exchange_s, max(0.0, step_s - data_s - optimizer_s - save_s))
        return StepPicture(
            rank=self._rank,
            step=self._step,
            steps=len(turns) if self._alone else len(looked),
            step_s=step_s,
            compute_s=max(0.0, step_s - exchange_s - data_s - optimizer_s - save_s),
            exchange_s=exchange_s,
            data_s=data_s,
            optimizer_s=optimizer_s,
            save_s=save_s,
        )

    def close(self) -> None:
        """Look at nothing any more, and remove the hooks. Idempotent."""
        self.drop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._close_bus()

    def _tried(self, action: Callable[[], T | None]) -> T | None:
        """Do something with torch's profiler; what it says against that must not end a training."""
        try:
            return action()
        except (AttributeError, RuntimeError, TypeError) as error:  # none of its own names is promised to stay
            self._looks = None
            what = f"exchanges are not looked at any more: torch's profiler says {type(error).__name__}: {error}"
            self._bus.emit(Notice(rank=self._rank, message=what))
            return None

    def _learn(self, looked: Looked, took_s: float) -> None:
        """Take note of what a look has shown, and of what it has cost: the first one is slow, and counts not at all."""
        if not self._is_ready or self._looks is None:
            self._is_ready = True
            return
        self._looked.append(looked)
        usual_s = median(self._usual)
        self._looks.took(self._looking_s, took_s - usual_s, usual_s + self._data_s)

    def _before_step(self, *_: object) -> None:
        self._stepping_s = self._clock.monotonic()

    def _after_step(self, *_: object) -> None:
        if self._stepping_s is not None:
            self._optimizer_s += self._clock.monotonic() - self._stepping_s
            self._stepping_s = None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self._saved_step = event.step
            self._save_s += event.stall_s
        elif isinstance(event, SaveFenced):
            self._save_s += event.waited_s
        elif isinstance(event, Tiered) and event.step != self._saved_step:  # a save to the tiers alone
            self._tiers_s.append(event.stall_s)  # said later, by another thread
