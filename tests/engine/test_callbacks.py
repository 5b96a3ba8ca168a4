"""What runs when a save is over may take as long as it likes: nothing of the save is held meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from resilient.engine.save_settings import SaveSettings
from resilient.errors import ErrorKind, StoreError
from resilient.format.digest import BytesLike
from resilient.state.capture import capture
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
