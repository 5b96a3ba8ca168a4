"""What every store must do: subclass `StoreConformance`, give it a ``store``."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from resilient.errors import CorruptError, ErrorKind, NotFoundError, UsageError
from resilient.store.base import Store

T = TypeVar("T")

UNUSUAL = (
    "with space/a b",
    "plus+plus",
    "per%cent/100%25",
    "equals=1,comma;semi",
    "trailing dot./x.",
    "größe/日本語/🙂",
    "'quote\"/#hash?query&and",
    "a/b.c/[bracket]{brace}*star",
    "~tilde/$dollar@at!bang",
)


def together(count: int, act: Callable[[int], T]) -> list[T]:
    """Return what ``act(i)`` gives in ``count`` threads that start at the same moment."""
    gate = threading.Barrier(count, timeout=30)

    def run(index: int) -> T:
        gate.wait()
        return act(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


class StoreConformance:
    many = 1_050
    """How many keys a listing is tried with: more than a page of an object store."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    def test_what_was_put_is_read_whole(self, store: Store) -> None:
        store.put("a/b", [b"one", bytearray(b"two"), memoryview(b"-three-")[1:-1], b""])
        assert store.get("a/b") == b"onetwothree"
        assert store.size("a/b") == 11

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("empty", [])
        store.put("empty too", [b"", b""])
        assert store.get("empty") == store.get("empty too") == b""
        assert store.size("empty") == 0
        store.read_into("empty", 0, memoryview(bytearray(0)))
        assert sorted(store.list("")) == ["empty", "empty too"]

    def test_a_put_replaces_what_was_there(self, store: Store) -> None:
        for content in (b"long content", b"short", b""):
            store.put("key", [content])
            assert store.get("key") == content

    def test_parts_of_any_sizes_lie_back_to_back(self, store: Store) -> None:
        seed = 20261130
        draw = random.Random(seed)
        parts: Sequence[bytes] = [draw.randbytes(draw.choice((0, 1, 7, 100))) for _ in range(3_000)]
        store.put("parts", parts)
        assert store.get("parts") == b"".join(parts), f"seed {seed}"

    def test_any_range_is_read_into_place(self, store: Store) -> None:
        content = bytes(range(256)) * 40
        store.put("ranges", [content])
        for start, nbytes in ((0, 1), (0, len(content)), (len(content) - 1, 1), (255, 2), (1_000, 5_000), (77, 0)):
            whole = bytearray(b"#" * (nbytes + 2))
            store.read_into("ranges", start, memoryview(whole)[1:-1])
            assert whole == b"#" + content[start : start + nbytes] + b"#"

    def test_an_object_that_is_too_short_is_corrupt(self, store: Store) -> None:
        store.put("short", [b"12345"])
        for start, nbytes in ((0, 6), (3, 3), (5, 1), (100, 1)):
            with pytest.raises(CorruptError, match=r"short.* ends at byte 5"):
                store.read_into("short", start, memoryview(bytearray(nbytes)))

    def test_what_is_missing_is_not_found(self, store: Store) -> None:
        store.put("folder/key", [b"x"])
        for missing in ("nothing", "folder/nothing", "folder", "no/such/folder", "folder/key/below"):
            calls: tuple[Callable[[], object], ...] = (
                lambda key=missing: store.get(key),  # type: ignore[misc]
                lambda key=missing: store.size(key),  # type: ignore[misc]
                lambda key=missing: store.read_into(key, 0, memoryview(bytearray(1))),  # type: ignore[misc]
                lambda key=missing: store.read_into(key, 0, memoryview(bytearray(0))),  # type: ignore[misc]
            )
            for call in calls:
                with pytest.raises(NotFoundError) as caught:
                    call()
                assert caught.value.kind is ErrorKind.NO_SUCH_OBJECT

    def test_create_keeps_what_is_there_and_knows_its_own(self, store: Store) -> None:
        assert store.create("claim", b"mine")
        assert store.create("claim", b"mine"), "a retry after a lost answer finds its own write"
        assert not store.create("claim", b"theirs")
        assert store.get("claim") == b"mine"
        assert store.create("empty", b"")
        assert not store.create("empty", b"x")

    def test_of_many_creates_at_once_exactly_one_wins(self, store: Store) -> None:
        if not store.capabilities.conditional_create:
            pytest.skip("this store does not promise it")
        for turn in range(3):
            won = together(8, lambda index, turn=turn: store.create(f"race/{turn}", b"%d" % index))  # type: ignore[misc]
            assert won.count(True) == 1
            assert store.get(f"race/{turn}") == b"%d" % won.index(True)

    def test_several_threads_share_a_store(self, store: Store) -> None:
        contents = [b"%d" % index * 10_000 for index in range(16)]

        def use(index: int) -> bool:
            store.put(f"threads/{index}/x", [contents[index]])
            into = bytearray(5_000)
            store.read_into(f"threads/{index}/x", 5_000, memoryview(into))
            good = store.get(f"threads/{index}/x") == contents[index] and into == contents[index][5_000:10_000]
            store.delete(f"threads/{index}/x")
            return good

        assert all(together(16, use))
        assert list(store.list("threads/")) == []

    def test_a_deleted_object_is_gone(self, store: Store) -> None:
        store.put("d/x", [b"1"])
        store.put("d/y", [b"2"])
        store.delete("d/x")
        store.delete("d/x")
        store.delete("never/was/there")
        with pytest.raises(NotFoundError):
            store.get("d/x")
        assert list(store.list("d/")) == ["d/y"]

    def test_listings_give_all_keys_below_a_prefix(self, store: Store) -> None:
        for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4", "5"):
            store.put(key, [b"x"])
        assert sorted(store.list("")) == ["5", "a/1", "a/b/2", "a/b/c/3", "ab/4"]
        assert sorted(store.list("a/")) == ["a/1", "a/b/2", "a/b/c/3"]
        assert list(store.list("a/b/c/")) == ["a/b/c/3"]
        assert list(store.list("nothing/")) == []
        assert sorted(store.folders("")) == ["a", "ab"]
        assert sorted(store.folders("a/")) == ["b"]
        assert list(store.folders("a/b/c/")) == list(store.folders("nothing/")) == []

    def test_listings_of_many_keys_are_complete(self, store: Store) -> None:
        keys = {f"many/{index % 3}/{index:05d}" for index in range(self.many)}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, [b"x"]), keys))
        listed = list(store.list("many/"))
        assert len(listed) == len(keys)
        assert set(listed) == keys
        assert sorted(store.folders("many/")) == ["0", "1", "2"]

    def test_unusual_keys_come_back_as_they_are(self, store: Store) -> None:
        for key in UNUSUAL:
            store.put(key, [key.encode()])
            assert store.create(key + "-created", b"1")
        for key in UNUSUAL:
            assert store.get(key) == key.encode()
            assert store.size(key) == len(key.encode())
        assert sorted(store.list("")) == sorted([*UNUSUAL, *(f"{key}-created" for key in UNUSUAL)])
        for key in UNUSUAL:
            store.delete(key)
        assert sorted(store.list("")) == sorted(f"{key}-created" for key in UNUSUAL)

    @pytest.mark.parametrize("key", ["", "/", "/etc/passwd", "a//b", "../outside", "a/../../b", "a/./b", "a/", "a\0b"])
    def test_no_key_reaches_outside_the_place(self, store: Store, key: str) -> None:
        for call in (store.get, store.size, store.delete):
            with pytest.raises(UsageError):
                call(key)
        with pytest.raises(UsageError):
            store.put(key, [b"x"])
        with pytest.raises(UsageError):
            store.create(key, b"x")
