"""An open round that this agent has joined: it is looked at, and closed if that is up to us."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, Self

from resilient.catalog.process import nonce
from resilient.clock import Deadline
from resilient.elastic.documents import Agent, Closed, Reach
from resilient.elastic.liveness import Gone, try_all
from resilient.elastic.membership import Asking, Membership
from resilient.elastic.membership import Self as Me
from resilient.elastic.rounds import (
    MESH,
    Close,
    Hold,
    Limits,
    Observed,
    address_for_all,
    cut_off,
    decide,
    in_order,
    to_watch,
)
from resilient.errors import ErrorKind, PeerError
from resilient.observe.logs import LOGGER

_POLL_S: Final = 0.25
_LAST_POLL_S: Final = 1.0
_EAGER_S: Final = 15.0  # so long an open round is looked at often
_SIGN_S: Final = 2.0  # between two signs of life
_ALIVE_S: Final = 5.0  # between two looks for members of the last round, by those who were not in it
_TRY_S: Final = 1.0
_READERS: Final = 3  # beyond the mesh, so many of the first read what all have written


class Newcomer(Protocol):
    """What an open round needs from the one who joins it: see `resilient.elastic.joining.Joining`."""

    me: Me
    ear: threading.Event
    asking: Callable[[], Asking]
    stopped: Callable[[], None]

    def alive(self, last: Closed) -> frozenset[str]: ...

    def moving(self, number: int, nonces: Iterable[str]) -> dict[str, Reach]: ...

    def check(self, other: Agent) -> None: ...

    def tell(self, what: str) -> None: ...


class OpenRound:
    """One round that this agent has joined."""

    def __init__(
        self, joining: Newcomer, number: int, last: Closed | None, previous: Membership | None, mine: Agent
    ) -> None:
        """``previous``: this agent's view of the last round, if it was in it. ``mine``: what it has joined with."""
        self._joining = joining
        self._me = joining.me
        self._number = number
        self._last = last
        self._previous = previous
        self._mine = mine
        self._watches = self._me.watches()
        self._clock = self._me.clock
        self._since = self._clock.monotonic()
        self._joined: frozenset[str] = frozenset()
        self._joined_at = self._since
        self._written: tuple[Mapping[str, int], Mapping[str, str]] | None = None
        self._written_at = self._since
        self._count = 0
        self._goes_on = False  # the job of the last round does
        self._alive: frozenset[str] = frozenset()
        self._alive_until = Deadline(self._clock, 0.0)

    def closed(self) -> Closed:
        """Return the round when it is closed, with or without us.

        Raises:
            PeerError: kind ``peer-timeout``: it was not closed in time; who is there and who is missing is named.
            ConflictError: kind ``mismatch``: this node runs something else than the others.
        """
        me, joining = self._me, self._joining
        deadline = Deadline(self._clock, me.conf.join_timeout)
        while True:
            joining.stopped()
            closed = me.ledger.closed(self._number)
            if closed is not None:
                return closed
            seen = self._look()
            verdict = decide(seen, self._limits())
            if isinstance(verdict, Close):
                closed = self._close(verdict, seen)
                if closed is not None:
                    return closed
            else:
                joining.tell(f"round {self._number}: {verdict.why}")
                if deadline.expired:
                    raise self._too_few(seen, verdict)
            eager = self._clock.monotonic() - self._since < _EAGER_S
            joining.ear.wait(min(_POLL_S if eager else _LAST_POLL_S, deadline.remaining_s or _POLL_S))
            joining.ear.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()

    def _limits(self) -> Limits:
        target = self._asking().target
        return Limits(
            least=min(self._me.least, target or self._me.least),
            most=min(self._me.most, target or self._me.most),
            last_call_s=self._me.conf.last_call_timeout,
            survivors_s=self._me.conf.survivors_timeout,
        )

    def _asking(self) -> Asking:
        """Return what the job was last asked for, as far as this agent or the last round knows."""
        mine, last = self._joining.asking(), self._last
        if last is not None and self._goes_on and last.request >= mine.request:
            return Asking(target=last.target, request=last.request)
        return mine

    def _look(self) -> Observed:
        me, now = self._me, self._clock.monotonic()
        expected = self._expected()
        self._goes_on = bool(expected)
        joins = {**me.ledger.agents(self._number, "join", me.ledger.names(self._number)), me.nonce: self._mine}
        order = in_order(joins.values(), self._last, expected)
        reached, unreached = self._try(order)
        joins = self._fitting(order, reached, unreached)
        if frozenset(joins) - self._joined:
            self._joined, self._joined_at = self._joined | frozenset(joins), now
        self._show(reached, unreached)
        reaches = self._joining.moving(self._number, self._to_read(order, reached))
        previous = self._previous
        return Observed(
            me=me.nonce,
            joins=joins,
            reaches={each: reach for each, reach in reaches.items() if each in joins and each not in self._dead()},
            last=self._last,
            expected=expected,
            waiting=previous.waiting if previous else frozenset(),
            doubtful=previous.doubtful if previous else frozenset(),
            done=len(previous.known.done) if previous else 0,
            since_s=now - self._since,
            quiet_s=now - self._joined_at,
        )

    def _expected(self) -> frozenset[str]:
        """Return the members of the last round that live."""
        if self._previous is not None:
            return self._previous.survivors
        if self._last is not None and self._alive_until.expired:
            self._alive = self._joining.alive(self._last)
            self._alive_until = Deadline(self._clock, _ALIVE_S)
        return self._alive

    def _try(self, order: Sequence[Agent]) -> tuple[dict[str, int], dict[str, str]]:
        """Find out whom we reach, and why not the others."""
        me = self._me.nonce
        watched = set(to_watch([agent.nonce for agent in order], me))
        self._watches.watch(agent for agent in order if agent.nonce in watched)
        reached = self._watches.reached()
        unreached = {other: gone.why for other, gone in self._watches.gone().items()}
        if len(order) > MESH and self._position(order, reached) < _READERS:
            rest = [agent for agent in order if agent.nonce not in watched and agent.nonce != me]
            for other, result in try_all(me, rest, timeout_s=_TRY_S).items():
                if isinstance(result, Gone):
                    unreached[other] = result.why
                else:
                    reached[other] = result
        return reached, unreached

    def _dead(self) -> set[str]:
        """Return who has left signs in the store that may look new, but is known to be dead."""
        return {other for other, gone in self._watches.gone().items() if gone.certain}

    def _position(self, order: Sequence[Agent], reached: Mapping[str, int]) -> int:
        """Return how many that we reach come before us."""
        alive = [agent.nonce for agent in order if agent.nonce in reached or agent.nonce == self._me.nonce]
        return alive.index(self._me.nonce)

    def _to_read(self, order: Sequence[Agent], reached: Mapping[str, int]) -> list[str]:
        """Return whose word about whom they reach is read: in a large job not everybody reads all of them."""
        if len(order) > MESH and self._position(order, reached) >= _READERS:
            return []
        return [agent.nonce for agent in order]

    def _fitting(
        self, order: Sequence[Agent], reached: Mapping[str, int], unreached: Mapping[str, str]
    ) -> dict[str, Agent]:
        """Leave out who runs something else than we do; refuse to go on if the first one that lives does.

        The first one alone is asked: of those who came in between, some may be about to be refused themselves.
        """
        before = order[: [each.nonce for each in order].index(self._me.nonce)]
        first = next((agent for agent in before if agent.nonce not in unreached), None)
        if first is not None and first.nonce in reached:
            self._joining.check(first)
        return {agent.nonce: agent for agent in order if self._mine.agreement.difference(agent.agreement) is None}

    def _show(self, reached: Mapping[str, int], unreached: Mapping[str, str]) -> None:
        now = self._clock.monotonic()
        if self._written == (reached, unreached) and now - self._written_at < _SIGN_S:
            return
        self._written, self._written_at, self._count = (reached, unreached), now, self._count + 1
        reach = Reach(nonce=self._me.nonce, count=self._count, reached=dict(reached), unreached=dict(unreached))
        self._me.ledger.write_reach(self._number, reach)

    def _close(self, verdict: Close, seen: Observed) -> Closed | None:
        me, last, members = self._me, self._last, verdict.members
        asking = self._asking()
        address, fell_back = address_for_all(members[0], members, seen.reaches)
        if fell_back:
            LOGGER.warning(
                "round %d: %r cannot be reached by all under %r: using its address %s",
                self._number,
                members[0].host,
                members[0].addresses[0],
                address,
            )
        closed = me.ledger.close(
            Closed(
                round=self._number,
                job=last.job if last is not None and self._goes_on else nonce(),
                members=members,
                master=members[0].nonce,
                address=address,
                port=members[0].store_port,
                target=asking.target,
                request=asking.request,
                by=me.nonce,
                created=me.now(),
            )
        )
        taken = {member.nonce for member in members}
        for left_out in sorted(seen.reaches.keys() - taken):
            if len(members) < self._limits().most:
                LOGGER.warning("round %d without %s", self._number, cut_off(left_out, sorted(taken), seen))
        return closed

    def _too_few(self, seen: Observed, verdict: Hold) -> PeerError:
        last = {} if self._last is None else {member.nonce: member.title for member in self._last.members}
        there = sorted(agent.title for agent in seen.joins.values() if agent.nonce in seen.reaches)
        missing = sorted(last.get(each, each) for each in seen.expected - seen.reaches.keys())
        if self._previous is not None:
            missing += [f"{last.get(each, each)}, lost: {lost.why}" for each, lost in self._previous.known.lost.items()]
        names = f"; missing: {', '.join(missing)}" if missing else ""
        return PeerError(
            f"round {self._number} did not come about within {self._me.conf.join_timeout:g} s: {verdict.why}; there: "
            f"{', '.join(there)}{names}",
            kind=ErrorKind.PEER_TIMEOUT,
            hint="start the missing nodes, ask for fewer with --nnodes, or wait longer with --rdzv-conf join_timeout=…",
        )
