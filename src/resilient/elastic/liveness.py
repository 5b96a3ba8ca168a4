"""Whether other agents live: each listens on a port, and holds connections to those that it watches.

A killed process closes its connections at once; a host that falls silent, or a cut of the network, shows by a ping
that is not answered. One more connection is tried before anything is said.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.elastic.documents import Agent

_LINE_NBYTES: Final = 4096
_PING: Final = b"p\n"
_POKE: Final = b"l\n"
_PONG: Final = b"P\n"
_TRIES_AT_ONCE: Final = 32
_TRIES_WHILE_ENDING: Final = 5
_ENDING_S: Final = 0.1
_MOST_CONNECTIONS: Final = 1024  # answered at once; who comes then waits in the queue of the socket
_REST_S: Final = 0.1  # where no connection can be accepted
_HELLO_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent that does not answer, ``since`` (by the monotonic clock).

    ``certain``: its host says that nobody listens there, so the process is dead.
    """

    why: str
    certain: bool
    since: float = 0.0


class Listener:
    """Answers whoever asks whether this agent lives, until it is closed."""

    def __init__(self, nonce: str, poked: Callable[[], None]) -> None:
        """``poked`` is called when another agent says that the store has news."""
        self._nonce = nonce
        self._poked = poked
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        else:
            self._socket = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="resilient-listener", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = list(self._open)
        for each in (self._socket, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if len(self._open) >= _MOST_CONNECTIONS:
                self._closed.wait(_REST_S)
                continue
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # That caller has gone again, or this process has no descriptor left: then the next try fails as well.
                self._closed.wait(_REST_S)
                continue
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._answer, args=(connection,), name="resilient-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rwb") as lines:
                hello = json.loads(lines.readline(_LINE_NBYTES))
                connection.settimeout(60.0)  # whoever watches pings much more often
                lines.write(json.dumps({"here": self._nonce}).encode() + b"\n")
                lines.flush()
                wanted = isinstance(hello, dict) and hello.get("to") == self._nonce
                while wanted and (line := lines.readline(_LINE_NBYTES)):
                    if line == _POKE:
                        self._poked()
                        continue
                    lines.write(_PONG)
                    lines.flush()
        with self._lock:
            self._open.discard(connection)


class Watch:
    """Watches one agent from a thread of its own, until it is gone or the watch is closed."""

    def __init__(self, me: str, agent: Agent, *, timeout_s: float, changed: Callable[[], None], clock: Clock) -> None:
        self._me = me
        self._agent = agent
        self._timeout_s = timeout_s
        self._changed = changed
        self._clock = clock
        self._stop = threading.Event()
        self._connection: socket.socket | None = None
        self._number_of_host = ""
        self.address: int | None = None
        """Which of its addresses works; None until one was found."""
        self.gone: Gone | None = None
        threading.Thread(target=self._run, name=f"resilient-watch-{agent.nonce}", daemon=True).start()

    @property
    def reached(self) -> bool:
        return self.address is not None and self.gone is None

    def poke(self) -> None:
        """Tell the agent that the store has news for it."""
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # whoever is gone needs no news, and its watch says that it is
                connection.sendall(_POKE)

    def close(self) -> None:
        """Stop; the thread ends soon."""
        self._stop.set()

    def _run(self) -> None:
        self._hold()
        tries = 0
        while not self._stop.is_set():
            # Once more: a connection may be cut by what stands between us.
            before = self._clock.monotonic()
            failure = self._hold()
            if failure.held and self._clock.monotonic() - before >= self._timeout_s:
                tries = 0
                continue
            tries += 1
            if failure.ending and tries < _TRIES_WHILE_ENDING:
                self._stop.wait(_ENDING_S)
                continue
            if not self._stop.is_set():
                self.gone = Gone(why=failure.why, certain=failure.refused, since=self._clock.monotonic())
                self._changed()
                return

    def _hold(self) -> _Failure:
        """Hold a connection as long as it answers; return why it does not any more."""
        first = self.address or 0
        order = [first, *(number for number in range(len(self._agent.addresses)) if number != first)]
        failures: list[_Failure] = []
        for number in order:
            # A name that was resolved once is not looked up again: a name server may be away with the host.
            address = self._number_of_host if number == self.address else self._agent.addresses[number]
            # Who was there a moment ago answers at once, or not at all.
            timeout_s = self._timeout_s if self.address is None else self._timeout_s / 3
            try:
                connection = connect(self._me, self._agent, address, timeout_s=timeout_s)
            except OSError as error:
                failures.append(_Failure.of(f"{address}:{self._agent.port}", error))
                if self._stop.is_set() or (number == self.address and failures[-1].refused):
                    break  # where it was found before, nobody listens any more
                continue
            if self.address != number:
                self.address, self._number_of_host = number, str(connection.getpeername()[0])
                self._changed()
            return self._ping(connection, address)
        return _all_of(failures)

    def _ping(self, connection: socket.socket, address: str) -> _Failure:
        where = f"{address}:{self._agent.port}"
        with connection:
            self._connection = connection
            try:
                while not self._stop.is_set():
                    connection.settimeout(self._timeout_s)
                    connection.sendall(_PING)
                    _answer(connection)
                    if self._ends(connection):
                        return _Failure(why=f"{where} has closed the connection", held=True)
            except OSError as error:
                return replace(_Failure.of(where, error), held=True)
            finally:
                self._connection = None
        return _Failure(why="not watched any more", held=True)

    def _ends(self, connection: socket.socket) -> bool:
        """Wait until the next ping is due; say whether the other end closes the connection meanwhile."""
        connection.settimeout(self._timeout_s / 3)
        try:
            return not connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why there is no connection. ``refused``: nobody listens there. ``held``: there was one before."""

    why: str
    refused: bool = False
    unknown: bool = False  # the name is not known here
    ending: bool = False  # somebody listens who is about to end
    held: bool = False

    @classmethod
    def of(cls, where: str, error: OSError) -> _Failure:
        said = str(error) if isinstance(error, StrangerError) else error.strerror or str(error) or "no answer"
        return cls(
            why=f"{where}: {said}",
            refused=isinstance(error, ConnectionRefusedError | StrangerError),
            unknown=isinstance(error, socket.gaierror),
            ending=isinstance(error, ConnectionResetError),
        )


def _all_of(failures: list[_Failure]) -> _Failure:
    """Return one failure for several addresses: refused only if none of them is silent, and not for unknown names."""
    silent = [each for each in failures if not each.refused and not each.unknown]
    refused = [each for each in failures if each.refused]
    return next(iter([*silent, *refused, *failures]), _Failure(why="it has no address"))


class StrangerError(OSError):
    """Another agent answers at that address and port."""


class Watches:
    """Whom this agent watches."""

    def __init__(self, me: str, *, timeout_s: float, changed: Callable[[], None], clock: Clock = SYSTEM_CLOCK) -> None:
        """``changed`` is called, from another thread, when somebody is reached for the first time or gone."""
        self._me = me
        self._timeout_s = timeout_s
        self._changed = changed
        self._clock = clock
        self._writing = threading.Lock()
        # Never changed, only replaced: several threads look at it.
        self._watched: Mapping[str, Watch] = {}
        self._closed = False

    def watch(self, agents: Iterable[Agent]) -> None:
        """Watch exactly these from now on; who is gone already stays so until it is left out once."""
        wanted = {agent.nonce: agent for agent in agents if agent.nonce != self._me}
        with self._writing:
            if self._closed:
                wanted = {}  # by a look that was under way: its threads would watch for ever
            before = self._watched
            self._watched = {nonce: before.get(nonce) or self._new(agent) for nonce, agent in wanted.items()}
        for nonce in set(before).difference(wanted):
            before[nonce].close()

    def again(self, agent: Agent) -> None:
        """Watch an agent that was gone anew."""
        with self._writing:
            if self._closed:
                return
            before = self._watched
            self._watched = {**before, agent.nonce: self._new(agent)}
        if agent.nonce in before:
            before[agent.nonce].close()

    def _new(self, agent: Agent) -> Watch:
        return Watch(self._me, agent, timeout_s=self._timeout_s, changed=self._changed, clock=self._clock)

    def reached(self) -> dict[str, int]:
        """Return who answers, and at which of its addresses."""
        return {
            nonce: each.address for nonce, each in self._watched.items() if each.reached and each.address is not None
        }

    def gone(self) -> dict[str, Gone]:
        """Return who does not answer, and why."""
        return {nonce: each.gone for nonce, each in self._watched.items() if each.gone is not None}

    def poke(self) -> None:
        """Tell everybody who is watched that the store has news."""
        for each in self._watched.values():
            each.poke()

    def close(self) -> None:
        """Watch nobody, from now on."""
        with self._writing:
            self._closed = True
        self.watch(())


def connect(me: str, agent: Agent, address: str, *, timeout_s: float) -> socket.socket:
    """Return a connection to an agent that has said who it is.

    Raises:
        OSError: nobody is there, or no answer in time; `StrangerError`: somebody else is.
    """
    connection = socket.create_connection((address, agent.port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps({"hello": me, "to": agent.nonce}).encode() + b"\n")
        try:
            here = json.loads(_answer(connection)).get("here")
        except (ValueError, AttributeError):
            here = None
        if here != agent.nonce:
            raise StrangerError("another process answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def try_all(me: str, agents: Iterable[Agent], *, timeout_s: float) -> dict[str, Gone | int]:
    """Try each agent once; return which of its addresses works, or why none does."""

    def attempt(agent: Agent) -> Gone | int:
        failures = []
        for number, address in enumerate(agent.addresses):
            try:
                connect(me, agent, address, timeout_s=timeout_s).close()
            except OSError as error:
                failures.append(_Failure.of(f"{address}:{agent.port}", error))
            else:
                return number
        failure = _all_of(failures)
        return Gone(why=failure.why, certain=failure.refused)

    everybody = list(agents)
    if not everybody:
        return {}
    with ThreadPoolExecutor(min(_TRIES_AT_ONCE, len(everybody)), thread_name_prefix="resilient-try") as pool:
        return dict(zip([agent.nonce for agent in everybody], pool.map(attempt, everybody), strict=True))


def poke(me: str, agents: Iterable[Agent], *, timeout_s: float) -> None:
    """Tell agents that are not watched that the store has news; who does not answer finds out without."""

    def tell(agent: Agent) -> None:
        for address in agent.addresses:
            with suppress(OSError), connect(me, agent, address, timeout_s=timeout_s) as connection:
                connection.sendall(_POKE)
                return

    everybody = list(agents)
    if everybody:
        with ThreadPoolExecutor(min(_TRIES_AT_ONCE, len(everybody)), thread_name_prefix="resilient-poke") as pool:
            list(pool.map(tell, everybody))


def _answer(connection: socket.socket) -> bytes:
    """Return one line."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_LINE_NBYTES)
        if not part:
            raise ConnectionResetError("the connection was closed")
        line += part
        if len(line) > _LINE_NBYTES:
            raise StrangerError("another process answers there")
    return line
