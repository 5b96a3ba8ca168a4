"""Ranks that want the same read it once; whatever fails on one rank fails on all, and nobody is left waiting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import resilient
from resilient.catalog.contents import open_manifest
from resilient.catalog.line import read_line
from resilient.engine import exchange
from resilient.engine.exchange import fill_together
from resilient.engine.peers import Peers
from resilient.engine.read import THREADS
from resilient.engine.restore import load_into
from resilient.errors import ErrorKind, ResilientError, StoreError
from resilient.events import Bus
from resilient.format.box import Box
from resilient.state.prepare import Target
from resilient.store.base import Store
from resilient.store.open import open_store
from tests.ranks import Ranks

MIB = 1 << 20
RANKS = 3
NBYTES = 125 * MIB
FIRST_TURN = RANKS * THREADS * 4 * MIB
TIMEOUT_S = 60.0


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    large, small = torch.empty(31 * MIB), torch.empty(MIB // 4)
    return {"large": large.normal_(generator=generator), "small": small.normal_(generator=generator)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("run"))
    resilient.save(place, 1, {"state": state()}).wait(60)
    return place


@contextmanager
def always(*, pays: bool) -> Iterator[None]:
    """Give the decision, also about little."""
    with (
        mock.patch.object(exchange, "LEAST_NBYTES", MIB),
        mock.patch.object(exchange, "exchange_pays", return_value=pays),
    ):
        yield


def exchange_as(store: Store, *, pays: bool, names: list[str]) -> int:
    """Fill tensors on all ranks, with the decision given; return the bytes that this rank read."""
    saved = state()
    manifest = open_manifest(store, read_line(store).commits[0])
    into = {tensor.name: torch.zeros(tensor.shape) for tensor in manifest.tensors if tensor.name in names}
    targets = [
        Target(tensor=tensor, box=Box.whole(tensor.shape), into=into[tensor.name])
        for tensor in manifest.tensors
        if tensor.name in names
    ]
    with always(pays=pays):
        nbytes = fill_together(store, manifest, targets, Peers.current(), TIMEOUT_S)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in into.items())
    return nbytes


def same_on_all(place: str, pays: bool) -> int:
    return exchange_as(open_store(place), pays=pays, names=["large", "small"])


def test_what_all_want_is_read_once_if_that_pays(ranks: Ranks, place: str) -> None:
    assert sum(ranks(RANKS).run(same_on_all, place, True)) == pytest.approx(NBYTES, rel=0.01)


def test_each_reads_the_rest_itself_if_that_is_faster(ranks: Ranks, place: str) -> None:
    read = ranks(RANKS).run(same_on_all, place, False)
    assert sum(read) == pytest.approx(FIRST_TURN + RANKS * (NBYTES - FIRST_TURN), rel=0.01)


def different(place: str) -> int:
    return exchange_as(open_store(place), pays=True, names=["large"] if dist.get_rank() else ["large", "small"])


def test_ranks_that_want_different_bytes_read_their_own(ranks: Ranks, place: str) -> None:
    assert sum(ranks(RANKS).run(different, place)) >= RANKS * 124 * MIB


class Failing:
    """A store in which one rank cannot read data from some byte on, or gets other bytes there."""

    def __init__(self, inner: Store, how: str, begin: int) -> None:
        self._inner = inner
        self._how = how
        self._begin = begin

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._inner.read_into(key, start, into)
        if key.startswith("data/") and start >= self._begin:
            if self._how == "raises":
                raise StoreError("the cable is out", kind=ErrorKind.IO, retryable=True)
            into[into.nbytes // 2] ^= 1


def broken(place: str, how: str, on: int, begin: int) -> str:
    """Restore while something goes wrong on one rank; return what this rank says about it."""
    store = open_store(place)
    commit = read_line(store).commits[0]
    into = {"state": {name: torch.zeros_like(tensor) for name, tensor in state().items()}}
    is_wrong = dist.get_rank() == on
    broadcast, passed = dist.broadcast, 0

    def on_the_wire(part: torch.Tensor, src: int) -> None:
        nonlocal passed
        broadcast(part, src=src)
        passed += part.numel()
        if is_wrong and how == "wire" and passed > begin:
            part[part.numel() // 2] ^= 1

    if is_wrong and how != "wire":
        store = Failing(store, how, begin)  # type: ignore[assignment]
    with always(pays=True), mock.patch.object(dist, "broadcast", on_the_wire):
        try:
            load_into(store, into, Peers.current(), commit, bus=Bus(), timeout_s=TIMEOUT_S)
        except ResilientError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


@pytest.mark.parametrize(("on", "begin"), [(1, 0), (0, FIRST_TURN)])
@pytest.mark.parametrize(
    ("how", "error"),
    [("raises", "StoreError: .*cable"), ("flips", "CorruptError: data/"), ("wire", "CorruptError: data/")],
)
def test_what_fails_on_one_rank_is_an_error_on_all(
    ranks: Ranks, place: str, how: str, error: str, on: int, begin: int
) -> None:
    answers = ranks(RANKS).run(broken, place, how, on, begin)
    assert all(re.match(error, answer) for answer in answers), answers


def grown_by(place: str) -> int:
    """Fill all tensors together; return how much memory that took beside them, at most."""
    into = {name: torch.ones_like(tensor) for name, tensor in state().items()}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    before = memory_nbytes("VmRSS")
    with always(pays=True):
        resilient.load(place, {"state": into})
    return memory_nbytes("VmHWM") - before


def memory_nbytes(line: str) -> int:
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.field_report("BR-165")
def test_what_all_want_passes_through_a_bounded_memory(ranks: Ranks, place: str) -> None:
    assert max(ranks(RANKS).run(grown_by, place)) < NBYTES // 2
