"""What a member of a closed round knows about it: who is lost, who waits, and whether its node has to form a new one.

A thread looks at the store every few seconds, and at once when the network says something, so that torchelastic, which
asks ten times a second, is answered from memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from resilient.catalog.requests import Request, RequestWatch
from resilient.clock import Clock, Deadline, rfc3339
from resilient.elastic.conf import Conf
from resilient.elastic.documents import Agent, Closed, Done, Ended, Lost, Reach
from resilient.elastic.ledger import Ledger, in_folder
from resilient.elastic.liveness import Gone, Listener, Watches, poke, try_all
from resilient.elastic.node import Asked, Node
from resilient.elastic.rounds import to_watch
from resilient.errors import ErrorKind, StoreError
from resilient.observe.logs import LOGGER

SIGN_INTERVAL_S: Final = 5.0
"""How often a member shows in the store that it lives, to those who cannot reach it."""

_TICK_S: Final = 0.2
_RETRY_S: Final = 15.0  # between two tries whether one who waits still answers
_STALE_S: Final = 2.0  # what was seen on the network before is looked at again before anybody is declared lost
_PARKING_S: Final = 3.0  # for workers to notice that another rank is gone
_FOLLOW_S: Final = 10.0  # after another node has left to form a round, parking workers have so long


class News:
    """Something has changed, on the network or in the store: wakes everybody who waits for that."""

    def __init__(self) -> None:
        self._ears: tuple[threading.Event, ...] = ()

    def ear(self) -> threading.Event:
        """Return what is set with each news from now on; whoever waits on it clears it."""
        ear = threading.Event()
        self._ears = (*self._ears, ear)
        return ear

    def drop(self, ear: threading.Event) -> None:
        """Let one go that nobody waits on any more."""
        self._ears = tuple(each for each in self._ears if each is not ear)

    def tell(self) -> None:
        for ear in self._ears:
            ear.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Self:
    """This agent: what it needs in every round."""

    agent: Agent  # as it waits; what it joins with has the port of that round's store as well
    ledger: Ledger
    node: Node
    conf: Conf
    clock: Clock
    least: int
    most: int
    listener: Listener
    news: News

    @property
    def nonce(self) -> str:
        return self.agent.nonce

    def now(self) -> str:
        return rfc3339(self.clock.now())

    def watches(self) -> Watches:
        return Watches(self.nonce, timeout_s=self.conf.ping_timeout, changed=self.news.tell, clock=self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What the job was asked for: ``target`` nodes, by the request of number ``request``; 0: nothing."""

    target: int = 0
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the last look at the store has shown. ``gone_on``: members that have joined the next round.

    ``waiting_for``: of those who wait and have said so, whom they do not reach.
    """

    lost: Mapping[str, Lost] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    waiting: Mapping[str, Agent] = field(default_factory=dict)
    waiting_for: Mapping[str, frozenset[str]] = field(default_factory=dict)
    gone_on: frozenset[str] = frozenset()
    superseded: bool = False  # the next round is closed


class Membership:
    """One member's view of its round, kept up to date by a thread until it is closed."""

    def __init__(self, me: Self, closed: Closed) -> None:
        self.closed = closed
        self.asking = Asking(target=closed.target, request=closed.request)
        """What the job was last asked for."""
        self.known = Known()
        self.local_workers: int | None = None
        """How many workers this node has; None: not known."""
        self.reform: str | None = None
        """Why a new round has to be formed now; None: it has not."""
        self._me = me
        self._ear = me.news.ear()
        self._requests = RequestWatch(me.ledger.store, closed.request)
        self._watches = me.watches()
        self._count = 0
        self._sign_at = 0.0
        self._asked_at: float | None = None
        self._followed_at: float | None = None
        self._broken_at: float | None = None
        self._tried: dict[str, tuple[float, bool]] = {}  # who waits: when it was tried, and whether it answered
        self._store_answers = True
        self._store_gone: str | None = None
        self._stopping = False
        self._since = me.clock.monotonic()
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._watch()
        self._thread = threading.Thread(target=self._run, name="resilient-membership", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, wait_s: float = 0.0) -> None:
        """Stop looking, and watching the members. The thread ends after the look that it may be at.

        ``wait_s``: so long that is waited for. In any case it says nothing to the workers any more.
        """
        self._stop.set()
        self._ear.set()
        self._me.news.drop(self._ear)
        self._watches.close()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def target(self) -> int:
        """Of how many nodes the job should be, if there are as many."""
        return min(self._me.most, self.asking.target or self._me.most)

    @property
    def survivors(self) -> frozenset[str]:
        """Members that are neither lost nor done, as far as known."""
        return frozenset(self.closed.nonces) - set(self.known.lost) - self.known.done

    @property
    def doubtful(self) -> frozenset[str]:
        """Members that fell silent, and may live where they cannot be seen."""
        return frozenset(nonce for nonce, lost in self.known.lost.items() if not lost.certain)

    @property
    def waiting(self) -> frozenset[str]:
        """Who asks to be let in, answers us, and reaches all members, as far as it has tried."""
        return frozenset(
            nonce
            for nonce, unreached in self.known.waiting_for.items()
            if self._tried.get(nonce, (0.0, False))[1] and not unreached.intersection(self.survivors)
        )

    def poke(self) -> None:
        """Tell the other members, and who waits, that the store has news."""
        self._watches.poke()
        poke(self._me.nonce, [self.known.waiting[nonce] for nonce in self.waiting], timeout_s=1.0)

    def look(self) -> None:
        """Look at the store once; say there who is lost, as long as it answers.

        A store that is away declares nobody dead: everybody may be as well as we are.
        """
        with self._looking:
            try:
                self._read()
                self._heed()
                self._declare()
                self._show()
            except StoreError as error:
                self._without_store(error)
            else:
                if not self._store_answers:
                    self._me.node.tell_store(answers=True)
                self._store_answers = True
            self._judge()

    def finish(self) -> None:
        """Say that the workers of this node have ended well, and wait until all others have ended too, or left.

        As long as that takes, the key-value server of this node serves the workers of the others.
        """
        me = self._me
        deadline = Deadline(me.clock, me.conf.exit_timeout)
        told, ear = False, me.news.ear()
        while not deadline.expired and not self._stop.is_set():
            told = told or self._tell_done()
            self.look()
            others = self.survivors - self.known.gone_on - {me.nonce}
            if told and self._store_answers:
                if not others:
                    self._tell_ended()
                    return
            elif not others.difference(self._watches.gone()):
                return  # without the store nobody can say that it is done; who does not answer either has left
            looked = Deadline(me.clock, _TICK_S)
            ear.wait(min(_TICK_S, deadline.remaining_s))
            self._stop.wait(looked.remaining_s)
            ear.clear()
        names = ", ".join(self._title(nonce) for nonce in sorted(self.survivors - {me.nonce}))
        LOGGER.warning("%s did not finish within %g s: not waiting any longer", names, deadline.timeout_s)

    def _tell_done(self) -> bool:
        """Say that this node is done; return whether that is known now."""
        try:
            self._me.ledger.write_done(self.closed.round, Done(nonce=self._me.nonce, created=self._me.now()))
        except StoreError:
            return False
        self.poke()
        return True

    def _tell_ended(self) -> None:
        """Say that the job is over, unless others go on; who waits for its turn need not wait any more."""
        if not self.known.gone_on:
            with suppress(StoreError):  # who waits finds out that nobody is left
                self._me.ledger.write_ended(self.closed.round, Ended(by=self._me.nonce, created=self._me.now()))

    def leave(self, why: str) -> None:
        """Say that this node takes part no more, so that the others need not find out.

        Raises:
            StoreError: it could not be said; they will find out.
        """
        me = self._me
        lost = Lost(nonce=me.nonce, by=me.nonce, why=why, certain=True, created=me.now())
        me.ledger.declare_lost(self.closed.round, lost)
        self.poke()

    def _run(self) -> None:
        poll_s, due, poked = self._me.conf.poll_interval, Deadline(self._me.clock, 0.0), False
        while not self._stop.is_set():
            looked = Deadline(self._me.clock, _TICK_S)
            try:
                if poked or due.expired:
                    due = Deadline(self._me.clock, poll_s)
                    self.look()
                else:
                    with self._looking:
                        self._judge()  # whether the workers have parked is in files of this host
            except Exception:  # noqa: BLE001 -- thread main: a node that looks no more would never form another round
                LOGGER.exception("round %d: a look at the round failed; the next one follows", self.closed.round)
            soon = self.reform is None and (self._asked_at is not None or self._broken_at is not None)
            poked = self._ear.wait(min(_TICK_S, poll_s) if soon else poll_s)
            self._stop.wait(looked.remaining_s)  # thousands may poke at once: one look serves them all
            poked = poked or self._ear.is_set()
            if poked:  # only then: what comes at this very moment is for the next time
                self._ear.clear()

    def _read(self) -> None:
        me, number = self._me, self.closed.round
        names, following = me.ledger.names(number), me.ledger.names(number + 1)
        joins = me.ledger.agents(number + 1, "join", following)
        members = set(self.closed.nonces)
        waiting = {**me.ledger.agents(number, "wait", names), **joins}
        self.known = Known(
            lost={nonce: lost for nonce, lost in me.ledger.lost(number, names).items() if nonce in members},
            done=frozenset(name.partition("/")[2] for name in in_folder("done", names)) & members,
            waiting={nonce: agent for nonce, agent in waiting.items() if nonce not in members},
            waiting_for={
                nonce: frozenset(reach.unreached)
                for nonce, reach in me.ledger.reaches(number, sorted(waiting.keys() - members)).items()
            },
            gone_on=frozenset(joins) & members - {me.nonce},
            superseded=me.ledger.closed(number + 1) is not None,
        )
        self._try_waiting()
        self._watch()

    def _heed(self) -> None:
        """Note what people ask of the job through the store."""
        request = self._requests.poll()
        if request is None:
            return
        LOGGER.info(
            "round %d: %s is asked for: %s", self.closed.round, _named(request), request.why or "no reason given"
        )
        if request.kind == "stop":
            # Rank 0 sees it as well; what is written here keeps this agent from starting stopped workers again.
            self._me.node.ask(Asked(kind="stop", why=f"a request to stop ({request.why})"))
            self._stopping = True
        elif request.nodes is not None:
            self.asking = Asking(target=request.nodes, request=self._requests.number)

    def _try_waiting(self) -> None:
        """Find out which of those who wait answer: what a dead one has left changes nothing."""
        now = self._me.clock.monotonic()
        due = [one for nonce, one in self.known.waiting.items() if now - self._tried.get(nonce, (-60.0,))[0] > _RETRY_S]
        for nonce, result in try_all(self._me.nonce, due, timeout_s=1.0).items():
            self._tried[nonce] = (now, not isinstance(result, Gone))

    def _watch(self) -> None:
        left = [member for member in self.closed.members if member.nonce not in self.known.lost]
        order = [agent.nonce for agent in left]
        watched = set(to_watch(order, self._me.nonce))
        self._watches.watch(agent for agent in left if agent.nonce in watched)

    def _declare(self) -> None:
        """Say in the store who does not answer. It has just been read: only who reaches it judges others."""
        me, number = self._me, self.closed.round
        for nonce, gone in self._watches.gone().items():
            if nonce in self.known.lost or me.ledger.is_done(number, nonce):
                continue  # who is done may leave
            if me.clock.monotonic() - gone.since > _STALE_S and self._answers_again(nonce):
                continue
            lost = Lost(nonce=nonce, by=me.nonce, why=gone.why, certain=gone.certain, created=me.now())
            me.ledger.declare_lost(number, lost)
            self.known = replace(self.known, lost={**self.known.lost, nonce: lost})
            self.poke()

    def _answers_again(self, nonce: str) -> bool:
        """Try a member once more: while the store was away, the same cut may have hidden the member, and be over."""
        member = next(each for each in self.closed.members if each.nonce == nonce)
        result = try_all(self._me.nonce, [member], timeout_s=1.0)[nonce]
        if isinstance(result, Gone):
            return False
        self._watches.again(member)
        return True

    def _show(self) -> None:
        me, now = self._me, self._me.clock.monotonic()
        if now - self._sign_at < SIGN_INTERVAL_S and self._count:
            return
        self._sign_at, self._count = now, self._count + 1
        unreached = {nonce: gone.why for nonce, gone in self._watches.gone().items()}
        reach = Reach(nonce=me.nonce, count=self._count, reached=self._watches.reached(), unreached=unreached)
        me.ledger.write_reach(self.closed.round, reach)

    def _without_store(self, error: StoreError) -> None:
        if self._store_answers:
            LOGGER.warning("the store of the rendezvous does not answer, training goes on: %s", error)
            self._me.node.tell_store(answers=False)
        self._store_answers = False
        if error.kind is ErrorKind.UNREACHABLE and not error.retryable:
            self._store_gone = str(error)

    def _judge(self) -> None:
        """Decide whether a new round has to be formed now, and ask the workers to get ready if one will be."""
        if self.reform is not None or self._stop.is_set():
            return
        if self._store_gone is not None and self._me.node.parked():
            broken: str | None = (
                self._store_gone
            )  # nobody is declared lost any more: the next round fails, and says why
        else:
            broken = self._broken()
        why = self._wanted() if broken is None else broken
        if why is None or (broken is not None and self._is_parking()):
            return
        if self._stop.is_set():
            return  # closed meanwhile: the directory is about to be that of the next workers
        LOGGER.info("round %d: %s; forming the next one", self.closed.round, why)
        self._me.node.restart()
        self.reform = why

    def _is_parking(self) -> bool:
        """Say whether workers are about to notice themselves that a round is over.

        One that has parked ends at once when it is told to. One that has not yet takes SIGTERM for a preemption, and
        tries to agree on a stop with ranks that are gone.
        """
        now = self._me.clock.monotonic()
        self._broken_at = now if self._broken_at is None else self._broken_at
        return now - self._broken_at < _PARKING_S and self._me.node.listen() > 0 and not self._parked()

    def _broken(self) -> str | None:
        """Say what makes it impossible to go on in this round."""
        known = self.known
        lost = {nonce: each for nonce, each in known.lost.items() if nonce not in known.done}
        if self._me.nonce in lost:
            return f"{self._title(lost[self._me.nonce].by)} holds this node for lost"
        if lost:
            return "; ".join(f"{self._title(nonce)} is lost: {each.why}" for nonce, each in sorted(lost.items()))
        if known.superseded:
            return "the other nodes have formed a round without this one"
        if not known.gone_on:
            return None
        gone_on = f"{', '.join(self._title(nonce) for nonce in sorted(known.gone_on))} forms a new round"
        if self._asked_at is None:
            return gone_on
        # They were asked for the same as we: ours are about to park, too.
        now = self._me.clock.monotonic()
        self._followed_at = now if self._followed_at is None else self._followed_at
        return gone_on if self._parked() or now - self._followed_at > _FOLLOW_S else None

    def _wanted(self) -> str | None:
        """Say why a round of another size is to be formed, once the workers are ready for it."""
        size, target = len(self.survivors), self.target
        if self._stopping:
            # Workers that were parked before do not look any more: their agent ends, and they with it.
            return "a stop was asked for" if self._parked() else None
        if size < target and self.waiting:
            names = ", ".join(self.known.waiting[nonce].title for nonce in sorted(self.waiting))
            why = f"{names} asks to be let in"
        elif size > target:
            why = f"the job is asked to go on with {target} nodes"
        elif self._asked_at is None:
            return None
        else:
            why = "workers were asked to park"  # what they were asked for is over, but they may have parked
        now = self._me.clock.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._me.node.ask(Asked(kind="resize", why=why))
            LOGGER.info("round %d: %s; the workers are asked to save and park", self.closed.round, why)
        waited = now - self._asked_at
        bound = self._bound_s(now)
        if self._parked():
            return f"{why}, and the workers are parked"
        return f"{why}, and the workers did not park within {bound:g} s" if waited >= bound else None

    def _bound_s(self, now: float) -> float:
        """Return how long workers have to park. Such as have not looked yet may still bring back their state."""
        conf, node = self._me.conf, self._me.node
        young = now - self._since < conf.resize_timeout
        return conf.resize_timeout if young or node.listen() else conf.deaf_timeout

    def _parked(self) -> bool:
        parked = {each.local_rank for each in self._me.node.parked()}
        workers = self._me.node.listen() if self.local_workers is None else self.local_workers
        return bool(parked) and len(parked) >= workers

    def _title(self, nonce: str) -> str:
        found = [member.title for member in self.closed.members if member.nonce == nonce]
        return found[0] if found else nonce


def _named(request: Request) -> str:
    return "a stop" if request.kind == "stop" else f"a size of {request.nodes} nodes"
