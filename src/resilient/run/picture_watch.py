"""Telling the pictures of steps: each rank its own, and rank 0 in one sentence what limits all of them.

Without a collective: like the times in `resilient.run.watch_stragglers`, what a rank says lies under one key.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

import msgspec

from resilient.catalog.process import host
from resilient.check import pcie
from resilient.check.context import Context
from resilient.check.result import Status
from resilient.clock import Clock
from resilient.config import Settings, read_process
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.events import Bottleneck, Bus, Notice, StepPicture
from resilient.observe.machine.counters import LOOPBACK
from resilient.observe.machine.sampler import MachineSampler
from resilient.policy.bottleneck import LinkUse, Spent, name_bottleneck
from resilient.run.picture import Picture
from resilient.run.picture_sampling import Looks

_JOIN_S: Final = 0.5
_NEIGHBORS: Final = 2
"""Steps that are not looked at have to be there too: the time of a step is theirs."""

_AGAIN: Final = 10
"""The same sentence comes again after so many pictures: its figures have changed."""


class _Link(msgspec.Struct, array_like=True):
    name: str
    sent: float
    received: float
    capable: float | None


class _Report(msgspec.Struct, array_like=True):
    host: str
    seconds: tuple[float, float, float, float, float, float]
    links: list[_Link]
    faults: list[str]


class PictureWatch:
    """The picture of this rank and the measuring of its node, with the thread that tells."""

    def __init__(self, peers: Peers, settings: Settings, *, topic: str, bus: Bus, clock: Clock) -> None:
        self._peers = peers
        self._topic = topic
        self._every_s = settings.compare_every_s
        self._bus = bus
        every = settings.picture_every
        looks = Looks(topic, every=max(_NEIGHBORS, every)) if every else None
        self.picture = Picture(looks, rank=peers.rank, alone=peers.world_size == 1, bus=bus, clock=clock)
        self._sampler: MachineSampler | None = None
        if settings.sample_machine_s and read_process().local_rank == 0:
            self._sampler = MachineSampler(
                rank=peers.rank, host=host(), period_s=settings.sample_machine_s, bus=bus, clock=clock
            )
        self._about = ""
        self._since = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-picture", daemon=True)

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
        self._thread.start()

    def close(self) -> None:
        """Tell what is not told yet, and end; from the training thread. A question under way is not waited for long."""
        self._ended.set()
        self.picture.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def tell(self) -> bool:
        """Tell the picture of this rank, if there is a new one; say whether there is.

        Raises:
            PeerError: the store does not answer.
        """
        picture = self.picture.take()
        if picture is None:
            return False
        self._bus.emit(picture)
        links = [] if self._sampler is None else [_Link(*rate) for rate in self._sampler.rates()]
        faults = _faults() if self._sampler is not None else []
        report = _Report(host(), _figures(picture), links, faults)
        self._peers.publish(f"{self._topic}/{self._peers.rank}", msgspec.msgpack.encode(report))
        return True

    def judge(self) -> None:
        """Say in one sentence what limits the steps of all ranks that have told, if that has changed, or now and then.

        Raises:
            PeerError: the store does not answer.
        """
        ranks, links, faults = [], [], []
        for rank in range(self._peers.world_size):
            said = self._peers.fetch(f"{self._topic}/{rank}", 0.0)
            if said is None:
                continue
            report = msgspec.msgpack.decode(said, type=_Report)
            ranks.append(_spent(rank, report.seconds))
            links += [_use(report.host, link) for link in report.links]
            faults += report.faults
        if not ranks:
            return
        found = name_bottleneck(ranks, links, faults)
        self._since += 1
        if found.about != self._about or self._since >= _AGAIN:
            self._about, self._since = found.about, 0
            self._bus.emit(Bottleneck(rank=self._peers.rank, sentence=found.sentence))

    def _run(self) -> None:
        ended = False
        try:
            while not ended:
                ended = self._ended.wait(self._every_s)
                with suppress(PeerError):  # it may only be slow; if it is gone, so is the job, which says so itself
                    if self.tell() and self._peers.rank == 0:
                        self.judge()
        except Exception as error:  # noqa: BLE001 -- thread main: training goes on without pictures
            what = f"no more pictures of steps are made: {type(error).__name__}: {error}"
            self._bus.emit(Notice(rank=self._peers.rank, message=what))


def _faults() -> list[str]:
    """Return what is wrong with the links of this machine's devices, which are at work."""
    results = pcie.judge(pcie.read_links(Context()), loaded=True)
    return [result.line for result in results if result.status is Status.FAILED]


def _figures(picture: StepPicture) -> tuple[float, float, float, float, float, float]:
    return (
        picture.step_s,
        picture.compute_s,
        picture.exchange_s,
        picture.data_s,
        picture.optimizer_s,
        picture.save_s,
    )


def _spent(rank: int, figures: tuple[float, float, float, float, float, float]) -> Spent:
    step_s, compute_s, exchange_s, data_s, optimizer_s, save_s = figures
    return Spent(
        rank=rank,
        step_s=step_s,
        compute_s=compute_s,
        exchange_s=exchange_s,
        data_s=data_s,
        optimizer_s=optimizer_s,
        save_s=save_s,
    )


def _use(machine: str, link: _Link) -> LinkUse:
    return LinkUse(
        host=machine,
        name=link.name,
        sent=link.sent,
        received=link.received,
        capable=link.capable,
        loopback=link.name == LOOPBACK,
    )
