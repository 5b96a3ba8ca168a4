"""How an agent gets into a round: it waits where others train, and joins where a round is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from resilient.clock import Deadline
from resilient.elastic.documents import Agent, Closed, Reach
from resilient.elastic.ledger import in_folder
from resilient.elastic.liveness import Gone, poke, try_all
from resilient.elastic.membership import SIGN_INTERVAL_S, Asking, Membership, Self
from resilient.elastic.open_round import OpenRound
from resilient.elastic.rounds import MESH
from resilient.errors import ConflictError, ErrorKind
from resilient.observe.logs import LOGGER

_POLL_S: Final = 1.0
_LIVES_S: Final = 3 * SIGN_INTERVAL_S  # who has shown nothing new for so long, and cannot be reached, is dead
_TRY_S: Final = 2.0
_FIRST_TELL_S: Final = 3.0  # what holds a round up for so long is told to people
_TELL_S: Final = 60.0  # and again after so long


class JobOver(Exception):  # noqa: N818 -- no error: what this agent waited for is done
    """The job has ended while this agent waited to be let in."""


class Joining:
    """One call for a round: by an agent whose workers are not running."""

    def __init__(
        self,
        me: Self,
        *,
        previous: Membership | None,
        start_store: Callable[[], int],
        asking: Callable[[], Asking],
        stopped: Callable[[], None],
    ) -> None:
        """``start_store`` starts a key-value server for one round and returns its port.

        ``previous``: the round that the agent was in. ``asking`` returns what the job was last asked for. ``stopped``
        is called again and again, and raises if the agent must not go on.
        """
        self.me = me
        self._previous = previous
        self._start_store = start_store
        self.asking = asking
        self.stopped = stopped
        self.ear = me.news.ear()
        self._tried: dict[str, Gone | int] = {}  # of members of the round that is waited at: what came of trying them
        self._written = 0
        self._told: tuple[str, float] = ("", 0.0)
        self._moved: dict[str, tuple[int, float]] = {}  # of each sign of life: its count, and when that was new

    def form(self) -> Closed:
        """Return a round that is closed and has this agent in it.

        Raises:
            PeerError: kind ``peer-timeout``: not enough nodes came in time; who is there and who is missing is named.
            ConflictError: kind ``mismatch``: this node runs something else than the others.
            JobOver: the job has ended meanwhile.
            StoreError: the store does not answer.
        """
        try:
            last = self.me.ledger.newest_closed(self._previous.closed.round if self._previous else 0)
            while True:
                if last is not None and not self._was_in(last):
                    last = self._wait(last)
                last = self._join(last)
                if self.me.nonce in last.nonces:
                    return last
        finally:
            self.me.news.drop(self.ear)

    def _was_in(self, last: Closed) -> bool:
        return self._previous is not None and self._previous.closed.round == last.round

    # Waiting where others train ---------------------------------------------------------------------------------------

    def _wait(self, last: Closed) -> Closed:
        """Ask to be let in, and wait until a round is open for us; return the last one that is closed then.

        A job that is over, or whose members are all dead, is waited for by nobody.
        """
        me = self.me
        if self._previous is not None:
            self._previous.close()
        first = True
        looked = Deadline(me.clock, 0.0)
        alive: frozenset[str] = frozenset()
        while True:
            self.stopped()
            newer = me.ledger.newest_closed(last.round)
            if newer is not None and newer.round > last.round:
                last, first = newer, True
                self._tried.clear()
            if me.ledger.has_ended(last.round):
                if first:
                    return last  # another start of the job under the same id
                raise JobOver
            if first or looked.expired:
                looked = Deadline(me.clock, SIGN_INTERVAL_S)
                alive = self.alive(last)
                if not alive:
                    return last
                self._show(last.round)
            if first:
                self.check(last.members[0])
                me.ledger.wait(last.round, me.agent)
                poke(me.nonce, (each for each in last.members if each.nonce in alive), timeout_s=_TRY_S)
                first = False
            if self._open(last.round + 1):
                return last
            self.tell(f"round {last.round} has {len(last.members)} nodes: waiting to be let in")
            self.ear.wait(_POLL_S)
            self.ear.clear()

    def alive(self, last: Closed) -> frozenset[str]:
        """Return members of a closed round that live, as far as can be seen from here; of a large one, some of them."""
        me = self.me
        names = me.ledger.names(last.round)
        gone = {name.partition("/")[2] for folder in ("lost", "done") for name in in_folder(folder, names)}
        left = [member for member in last.members if member.nonce not in gone and member.nonce != me.nonce]
        found: set[str] = set()
        while left and not found:
            some, left = left[:MESH], left[MESH:]
            results = try_all(me.nonce, some, timeout_s=_TRY_S)
            silent = [nonce for nonce, result in results.items() if isinstance(result, Gone) and not result.certain]
            found.update(nonce for nonce, result in results.items() if not isinstance(result, Gone))
            self._tried.update(results)
            found.update(self.moving(last.round, silent))
        return frozenset(found)

    def moving(self, number: int, nonces: Iterable[str]) -> dict[str, Reach]:
        """Return the signs of life that have moved lately; one that is seen for the first time has."""
        now = self.me.clock.monotonic()
        found = {}
        for nonce, reach in self.me.ledger.reaches(number, nonces).items():
            count, since = self._moved.get(f"{number}/{nonce}", (-1, now))
            if reach.count != count:
                self._moved[f"{number}/{nonce}"] = (reach.count, now)
                since = now
            if now - since <= _LIVES_S:
                found[nonce] = reach
        return found

    def _show(self, number: int) -> None:
        """Say whom we reach: members let nobody in who cannot take part."""
        self._written += 1
        reached = {nonce: result for nonce, result in self._tried.items() if not isinstance(result, Gone)}
        unreached = {nonce: result.why for nonce, result in self._tried.items() if isinstance(result, Gone)}
        reach = Reach(nonce=self.me.nonce, count=self._written, reached=reached, unreached=unreached)
        self.me.ledger.write_reach(number, reach)

    def _open(self, number: int) -> bool:
        """Say whether somebody who answers has joined that round."""
        me = self.me
        joins = me.ledger.agents(number, "join", me.ledger.names(number))
        results = try_all(me.nonce, joins.values(), timeout_s=_TRY_S)
        return any(not isinstance(result, Gone) for result in results.values())

    # Joining and closing ----------------------------------------------------------------------------------------------

    def _join(self, last: Closed | None) -> Closed:
        """Join the round after ``last``, and return it when it is closed, with or without us."""
        me = self.me
        number = 1 if last is None else last.round + 1
        mine = msgspec.structs.replace(me.agent, store_port=self._start_store(), created=me.now())
        if (closed := me.ledger.closed(number)) is not None:
            return closed
        me.ledger.join(number, mine)
        if self._previous is not None:
            self._previous.poke()
        previous = self._previous if last is not None and self._was_in(last) else None
        with OpenRound(self, number, last, previous, mine) as opened:
            return opened.closed()

    def check(self, other: Agent) -> None:
        """Refuse to take part with somebody who runs something else."""
        difference = self.me.agent.agreement.difference(other.agreement)
        if difference is not None:
            raise ConflictError(
                f"this node does not fit in: {other.title} runs {difference}",
                kind=ErrorKind.MISMATCH,
                hint="start all nodes of a job with the same command, torch and resilient; or give another --rdzv-id",
            )

    def tell(self, what: str) -> None:
        """Tell people what is waited for, if that lasts."""
        said, due = self._told
        now = self.me.clock.monotonic()
        if what != said:
            self._told = (what, now + _FIRST_TELL_S)
            LOGGER.debug("%s", what)
        elif now > due:
            self._told = (what, now + _TELL_S)
            LOGGER.info("%s", what)
