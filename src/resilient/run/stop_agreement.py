"""At which step all ranks stop, without a collective and without a wait in the steps before: see docs/design/010.

Whoever is asked to stop publishes that. A thread of every rank sees it, promises that its rank will not begin a turn
beyond the next one, and says how far that is; rank 0 takes the furthest. So the step that it names is one that nobody
has passed, and each rank comes to it: those that are at their promise wait there until it is named, all others
still get as far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from resilient.clock import Clock, Deadline
from resilient.engine.peers import Peers
from resilient.errors import PeerError

TIMEOUT_S: Final = 10.0
"""How long rank 0 waits for what the others have to say, which their threads do also while a step takes long."""

_RANKS_PER_S: Final = 5_000  # who report through one process, after they have seen that they have to; at least so many
_WAITS: Final = 2  # whoever waits for the word of rank 0 does so for so many times as long as rank 0 waits


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What is wanted of all ranks. ``within_s``: so soon after that, somebody is ended by force; None if nobody is."""

    kind: Literal["stop", "resize"]
    why: str
    rank: int
    within_s: float | None = None


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has settled: all stop once ``step`` steps are complete. None: the ranks could not agree this time."""

    step: int | None
    ask: Ask


class StopAgreement:
    """One rank's part: `depart` is for the thread that trains, `look` for another one."""

    def __init__(
        self, peers: Peers, topic: str, clock: Clock, *, notice: Callable[[str], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._peers = peers
        self._topic = topic
        self._clock = clock
        self._notice = notice
        self._timeout_s = timeout_s + peers.world_size / _RANKS_PER_S
        self._news = threading.Condition()
        # Under the condition: what the training thread and the other one both look at.
        self._passed: int | None = None
        self._held = False
        self._gave_up = False
        self._word: Word | None = None
        # The other thread's own: the round that is going on.
        self._round = 0
        self._ask: Ask | None = None
        self._asked_for = False
        self._reported = False
        self._reports = 0
        self._furthest = 0
        self._settled = False
        self._patience = Deadline(clock, 0.0)
        self._again = Deadline(clock, 0.0)

    @property
    def word(self) -> Word | None:
        """What is settled, for good; None as long as nothing is."""
        return self._word

    @property
    def busy(self) -> bool:
        """Whether ranks are just agreeing, so that `look` should be called often."""
        return self._ask is not None and self._word is None

    def start(self, step: int) -> None:
        """Begin: ``step`` steps are complete, and the next one is not begun."""
        with self._news:
            if self._passed is None:
                self._passed = step - 1

    def depart(self, step: int) -> Word | None:
        """Return the word to stop here, or None: the turn after ``step`` complete steps may begin.

        Waits only where this rank has promised to go no further, and only for a bounded time: then rank 0 is gone.
        """
        while True:
            with self._news:  # for the wait and what follows from it: in between, no promise may be made
                if self._may_go(step):
                    word = self._word
                    if word is not None and word.step is not None and step >= word.step:
                        return word
                    self._passed = step if self._passed is None else max(self._passed, step)
                    return None
                topic, again, self._gave_up = f"{self._topic}/{self._round}", self._gave_up, True
            if self._give_up(topic) or again:
                with self._news:
                    self._held = False
                self._notice(f"no word from rank 0 at which step to stop; training goes on after step {step}")

    def _may_go(self, step: int) -> bool:
        """Wait where this rank has promised to go no further; return whether that is settled. Under the lock."""
        if not self._held or self._passed is None or step <= self._passed:
            return True
        return self._news.wait_for(lambda: self._word is not None or not self._held, _WAITS * self._timeout_s)

    def _give_up(self, topic: str) -> bool:
        """Say that this rank waits no longer; return whether no word can come any more that it has to heed.

        First it says so, then it looks whether rank 0 is settling, which first says that, and then looks whether
        somebody has given up: so one of the two sees the other. Who sees that rank 0 is settling waits once more.
        """
        try:
            self._peers.publish(f"{topic}/gave-up", str(self._peers.rank).encode())
            return self._peers.fetch(f"{topic}/settling", 0.0) is None
        except PeerError:
            return True

    def look(self, wanted: Ask | None) -> None:
        """See what there is to see, and do this rank's part; never waits. ``wanted``: what this rank itself was asked.

        Raises:
            PeerError: the other ranks cannot be reached.
        """
        if self._word is not None:
            return
        if self._peers.world_size == 1:
            if wanted is not None and (promised := self._promise()) is not None:
                self._hear(Word(promised, wanted))
            return
        try:
            self._look(wanted)
        except PeerError:
            self._release()
            raise

    def _look(self, wanted: Ask | None) -> None:
        topic = f"{self._topic}/{self._round}"
        if self._ask is None:
            self._begin(topic, wanted)
        if self._ask is None:
            return
        if not self._reported and (promised := self._promise()) is not None:
            self._peers.publish(f"{topic}/at/{self._peers.rank}", str(promised).encode())
            self._reported = True
        if self._peers.rank == 0 and not self._settled:
            self._settle(topic, self._ask)
        said = self._peers.fetch(f"{topic}/word", 0.0)
        if said is not None:
            self._hear(msgspec.msgpack.decode(said, type=Word))

    def _begin(self, topic: str, wanted: Ask | None) -> None:
        if wanted is not None and not self._asked_for and self._again.expired:
            self._peers.publish(f"{topic}/ask", msgspec.msgpack.encode(wanted))
            self._asked_for = True
        found = self._peers.fetch(f"{topic}/ask", 0.0)
        if found is not None:
            self._ask = msgspec.msgpack.decode(found, type=Ask)
            self._patience = Deadline(self._clock, self._timeout_s)

    def _promise(self) -> int | None:
        """Go no further than to the end of the turn that goes on, or is next; return the number of that step."""
        with self._news:
            if self._passed is None:
                return None  # not even begun: it will say so once it is
            self._held = True
            return self._passed + 1

    def _settle(self, topic: str, ask: Ask) -> None:
        """As rank 0: name the furthest step, once every rank has said how far it may get."""
        while self._reports < self._peers.world_size and not self._patience.expired:
            found = self._peers.fetch(f"{topic}/at/{self._reports}", 0.0)
            if found is None:
                break
            self._furthest = max(self._furthest, int(found))
            self._reports += 1
        everybody = self._reports == self._peers.world_size
        if not everybody and not self._patience.expired:
            return
        why = None if everybody else f"rank {self._reports} has not said within {self._timeout_s:.3g} s how far it is"
        if everybody:
            self._peers.publish(f"{topic}/settling", b"")
            tired = self._peers.fetch(f"{topic}/gave-up", 0.0)  # who has gone on may have passed that step
            why = None if tired is None else f"rank {tired.decode()} has given up waiting for it"
        if why is not None:
            self._notice(f"the ranks cannot agree where to stop ({ask.why}): {why}; training goes on")
        word = Word(self._furthest if why is None else None, ask)
        self._peers.publish(f"{topic}/word", msgspec.msgpack.encode(word))
        self._settled = True

    def _hear(self, word: Word) -> None:
        if word.step is None:
            self._again = Deadline(self._clock, self._timeout_s)  # who is missing now will hardly be there in a moment
            self._release()
            self._round += 1  # only now: who waits reads it
            return
        with self._news:
            self._word = word
            self._news.notify_all()

    def _release(self) -> None:
        """End the round without a word: nobody waits, and what comes next starts anew."""
        self._ask, self._asked_for, self._reported, self._settled = None, False, False, False
        self._reports = self._furthest = 0
        with self._news:
            self._held = self._gave_up = False
            self._news.notify_all()
