"""The rendezvous backend ``resilient`` of torchrun: the part that torchelastic calls."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from resilient.catalog.process import nonce
from resilient.catalog.requests import newest_request
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline, rfc3339
from resilient.config import export, read_process, read_settings
from resilient.elastic.agent_store import AgentStore
from resilient.elastic.conf import Conf, read_conf
from resilient.elastic.directories import collect, make_directory
from resilient.elastic.documents import Agent, Closed
from resilient.elastic.endpoint import open_endpoint
from resilient.elastic.fitness import Fitness
from resilient.elastic.joining import JobOver, Joining
from resilient.elastic.ledger import Ledger
from resilient.elastic.liveness import Listener
from resilient.elastic.membership import Asking, Membership, News, Self
from resilient.elastic.node import Node
from resilient.elastic.this_node import addresses, agreement, host
from resilient.elastic.torchrun import REQUEUE, wants_requeue
from resilient.errors import ConflictError, PeerError, StoreError
from resilient.events import Bus
from resilient.observe.logs import LOGGER, show_logs
from resilient.store.retrying import Retrying

BACKEND: Final = "resilient"
_CALL_TIMEOUT_S: Final = 3.0  # of one call of the store while training goes on
_STORE_TIMEOUT_S: Final = 10.0  # of the key-value server: its host was reached a moment ago
_READY_S: Final = 60.0  # for all members to have seen that the round is closed
_POLL_S: Final = 0.02
_STOP_LOOKING_S: Final = 10.0  # for a look at the round before to end
_ROUNDS_KEPT: Final = 8  # with all that was said in them: a node that slept may still be reading
_LATE_ROUNDS: Final = 3  # after so many rounds in a row into which not all members came, no other one is tried


def create(parameters: RendezvousParameters) -> RoundsHandler:
    """Return the handler for the arguments of torchrun.

    Raises:
        UsageError: there is no place, or a setting is none.
        StoreError: the place cannot be reached, or does not tell who creates an object first.
    """
    conf = read_conf(parameters.config)
    show_logs(Bus())
    store = open_endpoint(parameters.endpoint, is_host=conf.is_host, timeout_s=conf.join_timeout, clock=SYSTEM_CLOCK)
    return RoundsHandler(store, parameters, conf, clock=SYSTEM_CLOCK)


class RoundsHandler(RendezvousHandler):
    """Forms rounds through the store, and says when a new one is needed."""

    def __init__(self, store: Retrying, parameters: RendezvousParameters, conf: Conf, *, clock: Clock) -> None:
        self._run_id = parameters.run_id
        self._clock = clock
        self._store = store
        self._membership: Membership | None = None
        self._server: dist.TCPStore | None = None
        self._next_server: dist.TCPStore | None = None
        self._agent_store: AgentStore | None = None
        self._finished = False
        self._late_rounds = 0
        self._asked = Asking(request=newest_request(store)[0])  # older ones were for others
        collect()
        self._directory = make_directory()
        exits = read_process().exits_dir
        self._exits = self._directory / "exits" if exits is None else Path(exits)
        self._exits.mkdir(exist_ok=True)
        export(RESILIENT_NODE_DIR=str(self._directory), RESILIENT_EXITS_DIR=str(self._exits))
        self._fitness = Fitness(store.within(_CALL_TIMEOUT_S), host(), parameters.run_id, clock=clock)
        self._checks = conf.check != "off"
        if self._checks:
            self._fitness.before_joining()
        self._me = self._introduce(parameters, conf)
        # What leaves by an exception or a signal that torchelastic does not clean up after.
        atexit.register(self._leave)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """The workers use the key-value server of an agent, which outlives them and is new in each round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round that this node is in.

        Raises:
            RendezvousTimeoutError: not enough nodes came in time, or some never came into a round that had them.
            SystemExit: the job is over (0), or was stopped (75).
        """
        self._check_stopped()
        for note in self._exits.iterdir():
            note.unlink(missing_ok=True)
        previous = self._membership
        if previous is not None and previous.reform is None:
            previous.reform = "its workers ended, and are started again"
        if previous is not None and self._checks:
            has_spare = bool(previous.waiting) or len(previous.survivors) > self._me.least
            self._fitness.after_attempt(read_settings(), has_spare=has_spare)
        while True:
            closed = self._form()
            if self._membership is not None:
                self._membership.close(wait_s=_STOP_LOOKING_S)
            # In each pass: what was said of a round that did not come about would end the next workers without a save.
            self._check_stopped()
            self._me.node.clear()
            self._membership = membership = Membership(self._member(), closed)
            membership.start()
            store = self._connect(closed, membership)
            if store is not None:
                return self._info(closed, membership, previous, store)
            membership.reform = membership.reform or "not all nodes came into this round"

    def is_closed(self) -> bool:
        return self._finished

    def set_closed(self) -> None:
        """Nothing: the job is over when the workers of all members have ended, see `Membership.finish`."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers are to be started anew in another round, from memory."""
        return int(self._membership is not None and self._membership.reform is not None)

    def shutdown(self) -> bool:
        """Take leave: for good, when this agent ends.

        Raises:
            SystemExit: the workers were stopped (75).
        """
        requeue = self._workers_want_requeue()
        if self._finished and self._checks:
            with suppress(ConflictError):  # it is written down, for the next job
                self._fitness.after_job()
        self._leave()
        if requeue:
            # torchelastic takes them for failed, and would end with 1.
            raise SystemExit(REQUEUE)
        return True

    def _introduce(self, parameters: RendezvousParameters, conf: Conf) -> Self:
        mine, now = nonce(), rfc3339(self._clock.now())
        node = Node(self._directory)
        news = News()
        listener = Listener(mine, news.tell)
        agent = Agent(
            nonce=mine,
            host=host(),
            pid=os.getpid(),
            addresses=addresses(parameters.local_addr),
            port=listener.port,
            store_port=0,
            agreement=agreement(str(torch.__version__), with_command=conf.check_command, parse=_command),
            created=now,
        )
        return Self(
            agent=agent,
            # A store that is away while a round is formed is waited for as long as for a node.
            ledger=Ledger(self._store.within(conf.join_timeout), self._run_id),
            node=node,
            conf=conf,
            clock=self._clock,
            least=parameters.min_nodes,
            most=parameters.max_nodes,
            listener=listener,
            news=news,
        )

    def _member(self) -> Self:
        """Return this agent with a view of the store whose calls are answered soon or not at all."""
        return replace(self._me, ledger=self._me.ledger.through(self._store.within(_CALL_TIMEOUT_S)))

    def _form(self) -> Closed:
        joining = Joining(
            self._me,
            previous=self._membership,
            start_store=self._start_store,
            asking=lambda: self._asked if self._membership is None else self._membership.asking,
            stopped=self._check_stopped,
        )
        try:
            return joining.form()
        except JobOver:
            LOGGER.info("the job %s has ended; this node was not needed", self._run_id)
            raise SystemExit(0) from None
        except PeerError as error:
            raise RendezvousTimeoutError(_in_words(error)) from error

    def _start_store(self) -> int:
        self._next_server = dist.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
        )
        return int(self._next_server.port)

    def _connect(self, closed: Closed, membership: Membership) -> dist.Store | None:
        """Return the round's key-value store when all members have come to it; None if one of them is gone.

        Raises:
            RendezvousTimeoutError: some have not come in time, again and again; they are named.
        """
        deadline = Deadline(self._clock, _READY_S)
        store = self._open_server(closed, membership, deadline)
        rank = closed.nonces.index(self._me.nonce)
        ready = [f"resilient/ready/{number}" for number in range(len(closed.members))]
        while store is not None and membership.reform is None and not deadline.expired:
            try:
                store.set(ready[rank], "")
                if store.check(ready):
                    self._late_rounds = 0
                    return store
            except RuntimeError:
                store = self._open_server(closed, membership, deadline)
            self._clock.sleep(_POLL_S)
        if membership.reform is None:
            self._count_late(closed, _missing(closed, store, ready))
        return None

    def _count_late(self, closed: Closed, missing: str) -> None:
        self._late_rounds += 1
        LOGGER.warning("round %d: within %g s %s; forming another one", closed.round, _READY_S, missing)
        if self._late_rounds >= _LATE_ROUNDS:
            raise RendezvousTimeoutError(
                f"{self._late_rounds} rounds in a row did not come about; in the last one {missing} "
                "(hint: look at the log of what is named, and whether a firewall lets all ports through)"
            )

    def _open_server(self, closed: Closed, membership: Membership, deadline: Deadline) -> dist.TCPStore | None:
        if closed.master == self._me.nonce:
            return self._next_server
        while membership.reform is None and not deadline.expired:
            try:
                return dist.TCPStore(
                    closed.address, closed.port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
                )
            except RuntimeError as error:
                # Its host is gone, which the membership is about to see as well; or it is only slow.
                LOGGER.debug("the key-value server of round %d: %s", closed.round, error)
                self._clock.sleep(_POLL_S)
        return None

    def _info(
        self, closed: Closed, membership: Membership, before: Membership | None, store: dist.Store
    ) -> RendezvousInfo:
        # Now nobody uses the server of the last round any more.
        self._server, self._next_server = self._next_server, None
        self._me.node.name_job(closed.job)
        rank = closed.nonces.index(self._me.nonce)
        if rank == 0 and closed.round > _ROUNDS_KEPT:
            # A job of months has thousands of rounds, and each has some objects of every node.
            old = closed.round - _ROUNDS_KEPT
            threading.Thread(target=self._clear, args=(old,), name="resilient-old-rounds", daemon=True).start()
        self._agent_store = AgentStore(
            store,
            broken=lambda: membership.reform is not None,
            finish=self._finish,
            workers=lambda count: setattr(membership, "local_workers", count),
            clock=self._clock,
        )
        server = f"{closed.address}:{closed.port}"
        LOGGER.info("%s; this one is node %d; the workers meet at %s", _in_one_line(closed, before), rank, server)
        where = RendezvousStoreInfo(master_addr=closed.address, master_port=closed.port)
        return RendezvousInfo(self._agent_store, rank, len(closed.members), where)

    def _clear(self, number: int) -> None:
        with suppress(StoreError):  # what stays is in nobody's way
            self._me.ledger.through(self._store).clear(number)

    def _finish(self) -> None:
        assert self._membership is not None
        self._finished = True
        self._membership.finish()

    def _check_stopped(self) -> None:
        """End this agent if its workers were stopped: they have saved, and must not be started again here."""
        asked = self._me.node.asked_last()
        if (asked is not None and asked.kind == "stop") or self._workers_want_requeue():
            LOGGER.info("the workers were stopped: exit code %d asks to be started again", REQUEUE)
            raise SystemExit(REQUEUE)

    def _workers_want_requeue(self) -> bool:
        notes = [note.read_text(encoding="utf-8", errors="replace") for note in self._exits.glob("*")]
        return wants_requeue(notes, signalled=False)

    def _leave(self) -> None:
        """Tell the others that this agent ends, if it has not finished; give everything back. Idempotent."""
        atexit.unregister(self._leave)
        membership, self._membership = self._membership, None
        if membership is not None:
            if not self._finished:
                with suppress(StoreError):  # they see it when the connections close
                    membership.leave("its agent ended")
            membership.close()
        self._me.listener.close()
        self._server = self._next_server = None
        shutil.rmtree(self._directory, ignore_errors=True)


def _command(arguments: Sequence[str]) -> Sequence[str]:
    from torch.distributed.run import parse_args  # noqa: PLC0415 -- only torchrun has it loaded

    parsed: Namespace = parse_args(list(arguments))  # type: ignore[no-untyped-call]  # torch's own
    return [parsed.training_script, *parsed.training_script_args]


def _missing(closed: Closed, store: dist.Store | None, ready: Sequence[str]) -> str:
    """Say in words what a round lacks: its key-value server, or some of its members."""
    server = f"the key-value server {closed.address}:{closed.port}"
    try:
        absent = None if store is None else [number for number, key in enumerate(ready) if not store.check([key])]
    except RuntimeError:
        absent = None
    if absent is None:
        return f"{server} of node 0 ({closed.members[0].title}) could not be reached"
    names = ", ".join(f"node {number} ({closed.members[number].title})" for number in absent)
    return f"{names or 'somebody'} did not come to {server}"


def _in_one_line(closed: Closed, before: Membership | None) -> str:
    """Say who is in a round, who of the one before is not and why, and who waits."""
    taken = set(closed.nonces)
    told = [f"round {closed.round}, {len(taken)} nodes: {', '.join(member.title for member in closed.members)}"]
    if before is not None:
        titles = {member.nonce: member.title for member in before.closed.members}
        lost = {nonce: each for nonce, each in before.known.lost.items() if nonce not in taken}
        told += [f"lost: {titles[nonce]} ({each.why})" for nonce, each in sorted(lost.items())]
        waiting = {**titles, **{nonce: agent.title for nonce, agent in before.known.waiting.items()}}
        told += [
            f"waiting: {title}"
            for nonce, title in sorted(waiting.items())
            if nonce not in taken and nonce not in lost and nonce not in before.known.done
        ]
    return "; ".join(told)


def _in_words(error: PeerError) -> str:
    return f"{error} (hint: {error.hint})"
