"""How ranks talk to each other beside the training: small byte strings in a key-value store, with deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import torch.distributed as dist

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.engine.key_values import TorchValues
from resilient.engine.meeting import KeyValues, meet
from resilient.errors import ErrorKind, PeerError, ResilientError
from resilient.writer.messages import Fault

_FIRST_POLL_S: Final = 0.001
_LAST_POLL_S: Final = 0.05
_MEET_TIMEOUT_S: Final = 300.0


class _OwnMemory:
    """The key-value store of a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class Peers:
    """The ranks of this job, seen from one of them.

    Topics must be new: a topic is used once in the life of a process group. `numbered` makes them so for calls that all
    ranks make in the same order.

    Every method may be called from any thread. A wait polls instead of blocking inside the store's client: a blocking
    wait holds the client's lock and would stall the training thread's own look-ups.
    """

    def __init__(
        self, rank: int, world_size: int, values: KeyValues, *, life: str = "", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """``life`` is what `meet` returned: it tells topics from those that earlier lives left in the same store."""
        self.rank = rank
        self.world_size = world_size
        self._values = values
        self._life = life
        self._clock = clock
        self._numbers = itertools.count()

    @classmethod
    def current(cls) -> Peers:
        """Return the peers of this process: those of the default process group, or nobody.

        The same object as long as the group is the same, so that `numbered` goes on counting.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1, _OwnMemory())
        group = dist.group.WORLD
        if _current and _current[0][0] is group:
            return _current[0][1]
        # The group's own store, also when the program made the group in its own way. It has no public accessor.
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- see above
        rank, world_size, values = dist.get_rank(), dist.get_world_size(), TorchValues(store)
        life = meet(values, rank, world_size, timeout_s=_MEET_TIMEOUT_S)
        peers = cls(rank, world_size, values, life=life)
        _current[:] = [(group, peers)]
        return peers

    def numbered(self, topic: str) -> str:
        """Return a topic that was not used before, the same on all ranks that call this in the same order."""
        return f"{topic}/{next(self._numbers)}"

    def _key(self, topic: str) -> str:
        return f"resilient/{self._life}/{topic}"

    def publish(self, topic: str, value: bytes) -> None:
        """Say something to all ranks that ask for this topic."""
        self._values.set(self._key(topic), value)

    def fetch(self, topic: str, timeout_s: float) -> bytes | None:
        """Return what was published, or None if nothing is in time."""
        deadline = Deadline(self._clock, timeout_s)
        poll_s = _FIRST_POLL_S
        while not self._values.check([self._key(topic)]):
            if deadline.expired:
                return None
            self._clock.sleep(min(poll_s, deadline.remaining_s))
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        return self._values.get(self._key(topic))

    def share(self, topic: str, make: Callable[[], bytes], timeout_s: float) -> bytes:
        """Return on all ranks what ``make`` returns on rank 0.

        Raises:
            ResilientError: what ``make`` raised on rank 0, on all ranks.
            PeerError: rank 0 did not answer in time.
        """
        if self.rank != 0:
            answer = self.fetch(topic, timeout_s)
            if answer is None:
                raise _no_answer(topic, [0], timeout_s)
            return unpack(answer)
        try:
            value = make()
        except ResilientError as error:
            self.publish(topic, pack_error(error))
            raise
        self.publish(topic, pack(value))
        return value

    def gather(self, topic: str, mine: bytes, timeout_s: float) -> list[bytes]:
        """Return on all ranks what each rank said, by rank: for a few bytes, when everybody is alive.

        Raises:
            PeerError: some ranks did not answer in time; they are named.
        """
        self.publish(f"{topic}/{self.rank}", mine)

        def collect() -> bytes:
            deadline = Deadline(self._clock, timeout_s)
            found = [self.fetch(f"{topic}/{rank}", deadline.remaining_s) for rank in range(self.world_size)]
            missing = [rank for rank, value in enumerate(found) if value is None]
            if missing:
                raise _no_answer(topic, missing, timeout_s)
            return msgspec.msgpack.encode(found)

        # Rank 0 may use up the whole time before it says who is missing: wait a little longer for that.
        everything = self.share(f"{topic}/all", collect, timeout_s + 5)
        return msgspec.msgpack.decode(everything, type=list[bytes])


_current: list[tuple[dist.ProcessGroup | None, Peers]] = []


class _Answer(msgspec.Struct, array_like=True):
    value: bytes = b""
    error: Fault | None = None


def pack_error(error: ResilientError) -> bytes:
    """Return an error as bytes; `unpack` raises it again on another rank."""
    return msgspec.msgpack.encode(_Answer(error=Fault.of(error)))


def pack(value: bytes) -> bytes:
    """Return a value as bytes that `unpack` tells from an error."""
    return msgspec.msgpack.encode(_Answer(value=value))


def unpack(answer: bytes) -> bytes:
    """Return what was given to `pack`, or raise what was given to `pack_error`."""
    opened = msgspec.msgpack.decode(answer, type=_Answer)
    if opened.error is not None:
        raise opened.error.error()
    return opened.value


def _no_answer(topic: str, ranks: Iterable[int], timeout_s: float) -> PeerError:
    who = ", ".join(map(str, ranks))
    return PeerError(
        f"no answer from rank {who} within {timeout_s:g} s (about {topic!r})",
        kind=ErrorKind.PEER_TIMEOUT,
        hint="every rank must make this call; look at the log of the rank that is named",
    )
