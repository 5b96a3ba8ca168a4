"""Who saves when, without a collective: rank 0 decides a little ahead, and every rank knows by the time it gets there.

All ranks must save the same steps, and whether a save is due (time), or must be skipped (the last one is still in
flight), differs from rank to rank. So rank 0 publishes its decisions ahead of time: "nothing up to step U, except a
save at step S". A rank that gets to a step without having heard waits a bounded time, then leaves that save out and
says so; it never waits in a collective.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from resilient.clock import Clock
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.policy.interval import SaveContext, SaveWhen

_AHEAD_S: Final = 1.0
_MIN_AHEAD: Final = 2
_MAX_AHEAD: Final = 64  # so that steps which get slow all at once do not put the next save off for long
_NEWS_TIMEOUT_S: Final = 5.0
_LISTEN_S: Final = 0.25

Skipped = Callable[[int, str], None]
"""What is called with a step and the reason why it is not saved."""


class Schedule(Protocol):
    """When this rank saves."""

    def start(self, step: int) -> None:
        """Begin: ``step`` steps are complete."""
        ...

    def due(self, context: SaveContext, in_flight: int | None) -> bool:
        """Say, at each boundary in turn, whether this rank saves the state after ``context.step``.

        ``in_flight`` is the step of the save that is not yet over, if there is one.
        """
        ...

    def close(self) -> None: ...


def schedule_for(policy: SaveWhen, peers: Peers, *, topic: str, clock: Clock, skipped: Skipped) -> Schedule:
    """Return the schedule of this rank; ``topic`` is this generation's own."""
    if peers.world_size == 1:
        return _Alone(policy, skipped)
    if peers.rank == 0:
        return _Decider(policy, peers, topic, clock, skipped)
    return _StepFollower(policy, peers, topic, skipped) if policy.step_based else _Follower(peers, topic, skipped)


class _Word(msgspec.Struct, array_like=True):
    """All steps up to ``until`` are decided; of those that were not before, ``save`` alone is saved."""

    until: int
    save: int | None


class _Alone:
    """One rank: nobody to agree with."""

    def __init__(self, policy: SaveWhen, skipped: Skipped) -> None:
        self._policy = policy
        self._busy = _Busy(skipped)

    def start(self, step: int) -> None:
        pass

    def due(self, context: SaveContext, in_flight: int | None) -> bool:
        return self._policy.due(context) and self._busy.free(
            context.step, in_flight, by_step=self._policy.at_step(context.step)
        )

    def close(self) -> None:
        pass


class _Decider:
    """Rank 0 of several."""

    def __init__(self, policy: SaveWhen, peers: Peers, topic: str, clock: Clock, skipped: Skipped) -> None:
        self._policy = policy
        self._peers = peers
        self._topic = topic
        self._clock = clock
        self._skipped = skipped
        self._busy = _Busy(skipped)
        self._until = 0
        self._planned: set[int] = set()
        self._words = 0
        self._last_s: float | None = None
        self._step_s = 0.0

    def start(self, step: int) -> None:
        self._until = max(self._until, step)
        self._last_s = None
        self._look_ahead(SaveContext(step=step, since_save_s=0.0), None)

    def due(self, context: SaveContext, in_flight: int | None) -> bool:
        self._measure()
        self._look_ahead(context, in_flight)
        if context.step not in self._planned:
            return False
        self._planned.remove(context.step)
        return True

    def close(self) -> None:
        pass

    def _measure(self) -> None:
        now = self._clock.monotonic()
        if self._last_s is not None:
            latest = now - self._last_s
            # Quick to believe that steps got slower (decisions then reach less far), slow to believe the opposite.
            self._step_s = latest if latest > self._step_s else 0.9 * self._step_s + 0.1 * latest
        self._last_s = now

    def _look_ahead(self, context: SaveContext, in_flight: int | None) -> None:
        """Decide further steps if those that are decided are about to be used up; at least the next one."""
        step, by_number = context.step, self._policy.next_step(context.step)
        if self._policy.step_based:
            if by_number == step + 1:
                self._decide(by_number, save=self._busy.free(by_number, in_flight, by_step=True))
            return
        ahead = max(_MIN_AHEAD, min(_MAX_AHEAD, math.ceil(_AHEAD_S / self._step_s))) if self._step_s else _MIN_AHEAD
        by_number = self._policy.next_step(self._until)
        if by_number is not None and by_number <= step + ahead:
            self._decide(by_number, save=self._busy.free(by_number, in_flight, by_step=True))
        elif not self._planned and self._timed(context) and self._busy.free(step, in_flight, by_step=False):
            self._decide(max(self._until + 1, step + ahead), save=True)
        elif self._until < step + ahead:
            beyond = step + 2 * ahead
            self._decide(beyond if by_number is None else min(beyond, by_number - 1), save=False)

    def _timed(self, context: SaveContext) -> bool:
        return self._policy.due(context) and not self._policy.at_step(context.step)

    def _decide(self, until: int, *, save: bool) -> None:
        """Settle all steps up to one, with or without a save of that one."""
        word = _Word(until, until if save else None)
        topic = f"{self._topic}/{until if self._policy.step_based else self._words}"
        try:
            self._peers.publish(topic, msgspec.msgpack.encode(word))
        except PeerError as error:
            if save:
                self._skipped(until, f"the other ranks could not be told: {error}")
            return
        self._words += 1
        self._until = until
        if save:
            self._planned.add(until)


class _StepFollower:
    """Another rank, where the number of the step says which saves there may be: only those need a word."""

    def __init__(self, policy: SaveWhen, peers: Peers, topic: str, skipped: Skipped) -> None:
        self._policy = policy
        self._peers = peers
        self._topic = topic
        self._skipped = skipped
        self._lost = False

    def start(self, step: int) -> None:
        pass

    def due(self, context: SaveContext, in_flight: int | None) -> bool:  # noqa: ARG002 -- rank 0 says what that means
        step = context.step
        if not self._policy.at_step(step):
            return False
        # After one silence a look without a wait: a rank 0 that is gone must not cost a pause at every save.
        try:
            found = self._peers.fetch(f"{self._topic}/{step}", 0.0 if self._lost else _NEWS_TIMEOUT_S)
        except PeerError:
            found = None
        self._lost = found is None
        if found is None:
            self._skipped(step, _no_word(step))
            return False
        return msgspec.msgpack.decode(found, type=_Word).save == step

    def close(self) -> None:
        pass


class _Follower:
    """Another rank, where only rank 0 can know when: a thread listens, so that the word is here before the step is."""

    def __init__(self, peers: Peers, topic: str, skipped: Skipped) -> None:
        self._peers = peers
        self._topic = topic
        self._skipped = skipped
        self._news = threading.Condition()
        self._until = -1
        self._saves: set[int] = set()
        self._passed = 0
        self._lost = False
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="resilient-schedule", daemon=True)

    def start(self, step: int) -> None:
        self._passed = step
        if not self._thread.is_alive():
            self._thread.start()

    def due(self, context: SaveContext, in_flight: int | None) -> bool:  # noqa: ARG002 -- rank 0 says what that means
        step = context.step
        with self._news:
            if self._until < step and not self._lost:
                self._lost = not self._news.wait_for(lambda: self._until >= step, _NEWS_TIMEOUT_S)
                if self._lost:
                    self._skipped(step, _no_word(step))
            self._passed = step
            due = step in self._saves
            self._saves = {save for save in self._saves if save > step}
        return due

    def close(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._thread.join(2 * _LISTEN_S)

    def _listen(self) -> None:
        words = 0
        while not self._ended:
            try:
                found = self._peers.fetch(f"{self._topic}/{words}", _LISTEN_S)
            except PeerError:
                return  # the store is gone, and with it the job; whoever waits gives up in time
            if found is None:
                continue
            words += 1
            word = msgspec.msgpack.decode(found, type=_Word)
            with self._news:
                self._until, self._lost = word.until, False
                if word.save is not None and word.save > self._passed:
                    self._saves.add(word.save)
                elif word.save is not None:
                    self._skipped(word.save, "the word of rank 0 came too late")
                self._news.notify_all()


class _Busy:
    """Says once for each save in flight that another one is left out because of it."""

    def __init__(self, skipped: Skipped) -> None:
        self._skipped = skipped
        self._told: int | None = None

    def free(self, step: int, in_flight: int | None, *, by_step: bool) -> bool:
        if in_flight is None:
            return True
        if by_step or self._told != in_flight:  # what is due by the clock stays due, and is not a new one at each step
            self._skipped(step, f"the save of step {in_flight} is still in flight")
        self._told = in_flight
        return False


def _no_word(step: int) -> str:
    return f"rank 0 has not said within {_NEWS_TIMEOUT_S:g} s whether to save step {step}"
