"""The process that takes part in the pair tests for one node; that of node 0 also decides who is tested with whom.

Nodes talk through torchrun's key-value store, by keys that are written once:

- ``hello/<node>``: it has come; ``local/<node>``: what it has found alone.
- ``wave/<k>``: node 0 says who is tested with whom, or that it is over, and how.
- ``result/<node>``: what node 0 has to tell that node at the end.
- ``report/<k>/<node>``: what a node saw in wave *k*.
- ``done/<node>``: it has read the end; node 0 leaves last, because its agent may be whose store it is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch.distributed as dist

from resilient.check import pairs
from resilient.check.across import NAME, Part
from resilient.check.pair_report import results_of
from resilient.check.pair_turn import Turn, Work, take_turn
from resilient.check.pairs import Outcome, Pair, Trial
from resilient.check.result import Result, Status, failed, worst
from resilient.check.suite import Begun, Ended
from resilient.check.worker import end_with_parent, say
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline

_CONNECT_S = 5.0
_KILLED_S = 2.0
_STEP_S = 1.0
_EXTRA_WAVES = 2
_NCCL_TIMES = 16  # a fast link needs more bytes to show how fast it is


class Hello(msgspec.Struct, frozen=True):
    host: str
    accelerated: bool


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """``pairs`` to be tested, or the end: the worst status of all nodes."""

    pairs: list[Pair] = []
    backend: str = "gloo"
    end: Status | None = None


def take_part(part: Part, work: type[Work] = Work, clock: Clock = SYSTEM_CLOCK) -> Ended:
    """Take part in the tests; return the results of all nodes on node 0, else those of this node; and the worst of all.

    Raises:
        RuntimeError: torch's, if the key-value store cannot be reached or a word of node 0 does not come.
    """
    member = _Member(part, work, clock)
    member.put(f"hello/{part.node}", Hello(part.host, _accelerated()))
    member.put(f"local/{part.node}", part.local)
    return _Leader(member).lead() if part.node == 0 else member.follow()


def _accelerated() -> bool:
    """Return whether NCCL can be used here. Looks at files: to ask CUDA would make this process unfit to fork."""
    devices = Path("/proc/driver/nvidia/gpus")
    return dist.is_nccl_available() and devices.is_dir() and any(devices.iterdir())


class _Member:
    def __init__(self, part: Part, work: type[Work], clock: Clock) -> None:
        self.part, self.clock, self.work = part, clock, work
        self._store = dist.PrefixStore(part.prefix, _connect(part))

    def put(self, key: str, value: object) -> None:
        self._store.set(key, msgspec.json.encode(value).decode())

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return a value as soon as it is there; None if it does not come in time."""
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, timeout_s)))
        except dist.DistStoreError:
            return None
        return self._store.get(key)

    def forget(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can: what stays is small, and dies with the job
            self._store.delete_key(key)

    def follow(self) -> Ended:
        number, timeout_s = 0, 2 * self.part.come_s
        while True:
            word = self.get(f"wave/{number}", timeout_s)
            if word is None:
                raise RuntimeError(f"node 0 has not said in {timeout_s:.0f} s what to do in wave {number}")
            wave = msgspec.json.decode(word, type=Wave)
            if wave.end is not None:
                own = self.get(f"result/{self.part.node}", timeout_s)
                self.put(f"done/{self.part.node}", None)
                return Ended(NAME, [] if own is None else msgspec.json.decode(own, type=list[Result]), wave.end)
            self.test(number, wave)
            number, timeout_s = number + 1, 3 * _wave_s(self.part)

    def test(self, number: int, wave: Wave) -> None:
        """Take part in a wave, if this node is in one of its pairs, and report."""
        pair = next((pair for pair in wave.pairs if self.part.node in pair), None)
        if pair is None:
            return
        turn = Turn(
            wave=number,
            side=pair.index(self.part.node),
            backend=wave.backend,
            nbytes=self.part.nbytes * (_NCCL_TIMES if wave.backend == "nccl" else 1),
            duration_s=self.part.turn_s,
            timeout_s=self.part.timeout_s,
        )
        self.put(f"report/{number}/{self.part.node}", self._turn(turn, pair))

    def _turn(self, turn: Turn, pair: Pair) -> Outcome:
        """Run a test in a child, which ends also if it hangs."""
        context = multiprocessing.get_context("fork")  # torch is imported already, and no device in use
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_in_child, args=(theirs, turn, pair, self), daemon=True)
        child.start()
        theirs.close()
        try:
            if not ours.poll(turn.timeout_s + turn.duration_s + _KILLED_S):
                return Outcome(why="the test did not end in time")
            return msgspec.json.decode(ours.recv_bytes(), type=Outcome)
        except EOFError:
            child.join(_KILLED_S)
            return Outcome(why=f"its process ended with {child.exitcode}")
        finally:
            ours.close()
            if child.is_alive():
                child.kill()
            child.join(_KILLED_S)


def _in_child(answer: Connection, turn: Turn, pair: Pair, member: _Member) -> None:
    part = member.part
    try:
        store = dist.PrefixStore(f"{part.prefix}/turn/{turn.wave}/{pair[0]}-{pair[1]}", _client(part, part.timeout_s))
        outcome = take_turn(turn, store, member.work, member.clock)
    except Exception as error:  # noqa: BLE001 -- the main of this process: what it has seen is the outcome
        outcome = Outcome(why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    answer.send_bytes(msgspec.json.encode(outcome))
    answer.close()
    os._exit(0)  # a device or a collective that hangs must not keep it from ending


class _Leader:
    """Node 0: takes part, and decides."""

    def __init__(self, member: _Member) -> None:
        self._member, self._part = member, member.part
        self._tests: list[Trial] = []
        self._waves = 0
        self._keys: list[str] = []

    def lead(self) -> Ended:
        hellos = self._hellos()
        present = sorted(hellos)
        backend = "nccl" if all(hello.accelerated for hello in hellos.values()) else "gloo"
        limits = self._part.limits
        self._run(pairs.first(present), backend)
        self._run(pairs.odd(present, self._tests, limits), backend)
        for wave in pairs.second(self._left(present), self._tests, limits):
            self._run([pair for pair in wave if set(pair) <= set(self._left(present))], backend)
        for _ in range(_EXTRA_WAVES):
            self._run(pairs.decisive(self._left(present), self._tests, limits), backend)
        results = self._results(hellos)
        everything = [result for each in results for result in each]
        self._end(present, results, worst(everything))
        return Ended(NAME, everything, worst(everything))

    def _left(self, present: Sequence[int]) -> list[int]:
        """Return the nodes that have not fallen silent: to wait for those again and again helps nobody."""
        lost = pairs.silent(self._tests)
        return [node for node in present if node not in lost]

    def _hellos(self) -> dict[int, Hello]:
        """Return the nodes that have come in time, this one among them."""
        deadline = Deadline(self._member.clock, self._part.come_s)
        found = {}
        for node in range(self._part.nodes):
            if (said := self._get(f"hello/{node}", deadline.remaining_s)) is not None:
                found[node] = msgspec.json.decode(said, type=Hello)
        return found

    def _run(self, wave: Sequence[Pair], backend: str) -> None:
        if not wave:
            return
        number, self._waves = self._waves, self._waves + 1
        deadline = Deadline(self._member.clock, _wave_s(self._part))
        self._put(f"wave/{number}", Wave(pairs=list(wave), backend=backend))
        self._member.test(number, Wave(pairs=list(wave), backend=backend))
        for pair in wave:
            one, other = (self._outcome(number, node, deadline) for node in pair)
            self._tests.append(Trial(pair=pair, outcomes=(one, other)))

    def _outcome(self, number: int, node: int, deadline: Deadline) -> Outcome | None:
        said = self._get(f"report/{number}/{node}", deadline.remaining_s)
        return None if said is None else msgspec.json.decode(said, type=Outcome)

    def _results(self, hellos: dict[int, Hello]) -> list[list[Result]]:
        """Return the results of all nodes, by node: what each has found alone, and what the pairs say of it."""
        titles = _titles({node: hello.host for node, hello in hellos.items()}, self._part.nodes)
        said = results_of(titles, self._tests, self._part.limits)
        results = []
        for node in range(self._part.nodes):
            local = self._get(f"local/{node}", _STEP_S) if node in hellos else None
            found = msgspec.json.decode(local, type=list[Result]) if local is not None else []
            found += said.get(node, [])
            if node not in hellos:
                why = f"node {node} has not come in {self._part.come_s:.0f} s"
                found.append(failed(NAME, why, "look whether it runs, and reaches this node's address and port"))
            results.append([msgspec.structs.replace(each, node=titles[node]) for each in found])
        return results

    def _end(self, present: Sequence[int], results: list[list[Result]], end: Status) -> None:
        for node in present:
            self._put(f"result/{node}", results[node])
        self._put(f"wave/{self._waves}", Wave(end=end))
        deadline = Deadline(self._member.clock, self._part.timeout_s)
        for node in present:
            if node != self._part.node:
                self._get(f"done/{node}", deadline.remaining_s)
        for key in self._keys:  # a second check of the same torchrun must not read this one's words
            self._member.forget(key)

    def _put(self, key: str, value: object) -> None:
        self._keys.append(key)
        self._member.put(key, value)

    def _get(self, key: str, timeout_s: float) -> bytes | None:
        self._keys.append(key)
        return self._member.get(key, timeout_s)


def _wave_s(part: Part) -> float:
    """Return how long a wave takes at most: a test that never ends is ended, and reported a little later."""
    return part.timeout_s + part.turn_s + 2 * _KILLED_S


def _titles(hosts: dict[int, str], nodes: int) -> list[str]:
    """Return a name for each node: its host, with a number where several have one name."""
    said = [hosts.get(node, f"node {node}") for node in range(nodes)]
    return [host if said.count(host) == 1 else f"{host}#{node}" for node, host in enumerate(said)]


def _connect(part: Part) -> dist.Store:
    """Connect to the key-value store of torchrun's agent; where there is none, node 0 is it."""
    if part.node != 0 or _listens(part.address, part.port):
        return _client(part, part.come_s)
    timeout = timedelta(seconds=part.timeout_s)
    return dist.TCPStore(part.address, part.port, is_master=True, timeout=timeout, wait_for_workers=False)


def _listens(address: str, port: int) -> bool:
    """Return whether somebody listens there: torch would ask again and again until its timeout."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _client(part: Part, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(part.address, part.port, is_master=False, timeout=timeout, wait_for_workers=False)


def main() -> None:
    """Take part as stdin says; answer on stdout as `resilient.check.worker` does."""
    answers = os.dup(1)
    os.dup2(2, 1)
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=Part)
    end_with_parent()
    say(answers, Begun(NAME))
    try:
        ended = take_part(part)
    except Exception as error:  # noqa: BLE001 -- the main of this process: stored as what the check has found
        why = f"the nodes could not be tested in pairs: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        lost = failed(NAME, why, "look whether all nodes run the check, and reach the address of node 0")
        ended = Ended(NAME, [*part.local, msgspec.structs.replace(lost, node=part.host)], Status.FAILED)
    say(answers, ended)
    os._exit(0)  # what torch still holds must not keep it from ending


if __name__ == "__main__":
    main()
