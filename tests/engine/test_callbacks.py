"""What runs when a save is over may take as long as it likes: nothing of the save is held meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from resilient.engine.handle import committed_handle
from resilient.engine.save_settings import SaveSettings
from resilient.errors import ErrorKind, StoreError
from resilient.events import Notice
from resilient.format.digest import BytesLike
from resilient.state.capture import capture
from resilient.state.leaves import Captured
from resilient.store.memory import MemoryStore
from tests.engine.rank_threads import make_ranks


class Gated(MemoryStore):
    """A store that takes data, or refuses it, when the test says so."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self._refuses = refuses
        self.open = threading.Event()

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if key.startswith("data/"):
            assert self.open.wait(30)
            if self._refuses:
                raise StoreError("no space", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


def state() -> Captured:
    return capture({"s": {"w": torch.ones(100_000)}}, rank=0, world_size=1)


@pytest.mark.field_report("BR-167")
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("stage", ["persisted", "committed"])
def test_what_was_staged_is_free_before_callbacks_run(stage: str, refuses: bool) -> None:
    store = Gated(refuses=refuses)
    (rank,) = make_ranks(store, 1, SaveSettings(staging_slots=1))
    owner = np.ones(100_000, dtype=np.float32)
    gone = weakref.ref(owner)
    tree = {"s": {"w": torch.from_numpy(owner)}}
    del owner
    handle = rank.saver.save(1, capture(tree, rank=0, world_size=1), reason="test")
    tree.clear()
    seen: list[tuple[bool, bool]] = []
    called = threading.Event()

    def look(_: Future[object]) -> None:
        gc.collect()
        seen.append((gone() is None, rank.saver._arena.is_free))
        called.set()

    getattr(handle, stage).add_done_callback(look)
    store.open.set()
    assert called.wait(30)
    assert seen == [(True, True)], "the state that was saved, and the slot that it was staged in"
    assert rank.saver.close(30)


@pytest.mark.parametrize("stage", ["staged", "persisted", "committed"])
def test_a_callback_may_wait_for_another_save(stage: str) -> None:
    store = Gated(refuses=False)
    (rank,) = make_ranks(store, 1)
    first = rank.saver.save(1, state(), reason="test")
    second = rank.saver.save(2, state(), reason="test")
    ends: list[int] = []
    getattr(first, stage).add_done_callback(lambda _: ends.append(second.committed.result(20)))
    store.open.set()
    second.wait(10)
    assert rank.saver.close(30)
    assert ends == [2], "and the end has waited for the callback"


def test_what_a_callback_raises_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: hooked.append(arguments.exc_type))
    store = Gated(refuses=False)
    (rank,) = make_ranks(store, 1)
    handle = rank.saver.save(1, state(), reason="test")
    called: list[object] = []
    for callback in (lambda _: sys.exit(1), lambda _: 1 // 0, called.append):
        handle.committed.add_done_callback(callback)
    store.open.set()
    handle.wait(20)
    assert rank.saver.close(30)
    assert hooked == [SystemExit, ZeroDivisionError]
    assert called == [handle.committed]


def test_a_callback_that_never_returns_is_not_waited_for() -> None:
    store = Gated(refuses=False)
    store.open.set()
    (rank,) = make_ranks(store, 1)
    handle = rank.saver.save(1, state(), reason="test")
    never = threading.Event()
    handle.committed.add_done_callback(lambda _: never.wait(60))
    handle.wait(20)
    rank.saver.save(2, state(), reason="test").wait(20)
    assert rank.saver.close(2)
    assert any(isinstance(each, Notice) and "callback" in each.message for each in rank.events)
    never.set()


def test_callbacks_of_what_is_over_run_too() -> None:
    handle = committed_handle(3)
    called: list[object] = []
    handle.committed.add_done_callback(called.append)
    assert called == [handle.committed]
