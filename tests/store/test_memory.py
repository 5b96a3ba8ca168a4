from __future__ import annotations

import pytest

from resilient.store.base import Store
from resilient.store.memory import MemoryStore, shared_memory_store
from tests.store.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore("conformance")


def test_a_name_is_one_place_in_a_process() -> None:
    shared_memory_store("test-memory/one").put("key", [b"x"])
    assert shared_memory_store("test-memory/one").get("key") == b"x"
    assert list(shared_memory_store("test-memory/two").list("")) == []


def test_what_is_stored_does_not_change_with_the_buffer_it_came_from() -> None:
    store = MemoryStore()
    buffer = bytearray(b"before")
    store.put("key", [buffer])
    buffer[:] = b"after!"
    assert store.get("key") == b"before"
