"""What every store must do: subclass `StoreConformance`, give it a ``store``."""

from __future__ import annotations

import random  # noqa: TID251 -- fixed seeds, printed: a suite that others run needs no option for one
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def found(store: Store, key: str) -> bytes | None:
    """Return an object, or None if there is none."""
    try:
        return store.get(key)
    except NotFoundError:
        return None


class StoreConformance:
    """The suite that a store has to pass before a run is safe on it.

    A subclass overrides `store`, and `reopen` where there can be a second instance. What a store does not declare among
    its `Capabilities` is skipped::

        class TestMyStore(StoreConformance):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(tmp_path)

            def reopen(self, store):
                return MyStore(store.path)
    """

    many = 1_050
    """How many keys a listing is tried with: more than a page of an object store."""
    large_nbytes = (20 << 20) + 17
    """How large a large object is: more than one request of an object store."""

    @pytest.fixture
    def store(self) -> Store:
        """Return a store on a fresh, empty place. Subclasses override this."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store | None:  # noqa: ARG002 -- what overrides it needs it
        """Return another instance on the same place, as another process would open it.

        None skips what needs one. What a bench can do to lose what is not durable (cut the power of the disk, kill the
        server, `FaultyStore.crash`) belongs in here: all that was acknowledged before must still be there.
        """
        return None

    def _another(self, store: Store) -> Store:
        another = self.reopen(store)
        if another is None:
            pytest.skip("reopen() gives no other instance of this store")
        return another

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
        draw = random.Random(seed)  # noqa: S311 -- no secrets
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
        # A lock inside one instance would decide between its threads, and not between machines.
        instances = (store, self.reopen(store) or store)
        for turn in range(5):
            key = f"race/{turn}"
            won = together(8, lambda index, key=key: instances[index % 2].create(key, b"%d" % index))  # type: ignore[misc]
            assert won.count(True) == 1, f"{won.count(True)} of 8 writers were told that they had won"
            assert store.get(key) == b"%d" % won.index(True)

    def test_a_reader_sees_an_object_whole_or_not_at_all(self, store: Store) -> None:
        if not store.capabilities.atomic_put:
            pytest.skip("this store does not promise it")
        sizes = (300_000, 1, 200_000)
        store.put("whole/put", [b"0" * sizes[0]])
        done = threading.Event()

        def write() -> list[str]:
            try:
                for turn in range(1, 13):
                    store.put("whole/put", [b"%d" % (turn % 10) * sizes[turn % 3]])
                    store.create(f"whole/created-{turn}", b"c" * 100_000)
            finally:
                done.set()
            return []

        def read() -> list[str]:
            torn: list[str] = []
            turn = 1
            while not done.is_set():
                content = store.get("whole/put")
                if len(content) not in sizes or content != content[:1] * len(content):
                    torn.append(f"{len(content)} bytes of {sorted(set(content))}")
                created = found(store, f"whole/created-{turn}")
                if created is None:
                    continue
                if created != b"c" * 100_000:
                    torn.append(f"{len(created)} bytes of a create")
                turn = turn % 12 + 1
            return torn

        outcomes = together(3, lambda index: read() if index else write())
        assert [torn for outcome in outcomes for torn in outcome] == []

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

    def test_a_deleted_object_can_be_stored_anew(self, store: Store) -> None:
        for turn in range(3):
            assert store.create("again/created", b"turn %d" % turn)
            assert not store.create("again/created", b"another")
            assert store.get("again/created") == b"turn %d" % turn
            store.put("again/put", [b"%d" % turn])
            assert store.get("again/put") == b"%d" % turn
            store.delete("again/created")
            store.delete("again/put")
            assert list(store.list("again/")) == []

    def test_another_instance_reads_what_was_just_written(self, store: Store) -> None:
        another = self._another(store)
        for turn in range(5):
            content = b"turn %d" % turn
            store.put("shared/overwritten", [content])
            assert another.get("shared/overwritten") == content
            assert store.create(f"shared/created-{turn}", content)
            assert another.get(f"shared/created-{turn}") == content
            assert not another.create(f"shared/created-{turn}", b"theirs")
            assert another.size(f"shared/created-{turn}") == len(content)
            another.delete(f"shared/created-{turn}")
            with pytest.raises(NotFoundError):
                store.get(f"shared/created-{turn}")
            another.put("shared/back", [content])
            assert store.get("shared/back") == content
        assert sorted(store.list("shared/")) == sorted(another.list("shared/")) == ["shared/back", "shared/overwritten"]

    def test_what_was_acknowledged_is_still_there_after_reopening(self, store: Store) -> None:
        for index in range(20):
            store.put(f"kept/put-{index}", [b"old"])
            store.put(f"kept/put-{index}", [b"content ", b"%d" % index])
            assert store.create(f"kept/created-{index}", b"claim %d" % index)
            store.put(f"kept/deleted-{index}", [b"x"])
            store.delete(f"kept/deleted-{index}")
        another = self._another(store)
        for index in range(20):
            # By their exact names: a listing may leave something out, a read may not.
            assert found(another, f"kept/put-{index}") == b"content %d" % index, "an acknowledged put was lost"
            assert found(another, f"kept/created-{index}") == b"claim %d" % index, "an acknowledged create was lost"
            assert found(another, f"kept/deleted-{index}") is None, "an acknowledged delete was lost"
        wanted = [f"kept/{verb}-{index}" for verb in ("put", "created") for index in range(20)]
        assert sorted(another.list("kept/")) == sorted(wanted)

    def test_a_large_object_comes_back_as_it_was(self, store: Store) -> None:
        seed = 20261201
        block = random.Random(seed).randbytes(1 << 20)  # noqa: S311 -- no secrets
        count, rest = divmod(self.large_nbytes, len(block))
        store.put("large", [*(memoryview(block)[:-1] for _ in range(count)), block[: count + rest]])
        assert store.size("large") == self.large_nbytes
        content = (block[:-1] * count) + block[: count + rest]
        assert store.get("large") == content, f"seed {seed}"
        into = bytearray(3 << 20)
        for start in (0, (5 << 20) - 7, self.large_nbytes - len(into)):
            store.read_into("large", start, memoryview(into))
            assert into == content[start : start + len(into)], f"seed {seed}"

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

    def test_listings_follow_puts_and_deletes(self, store: Store) -> None:
        there: set[str] = set()
        for index in range(40):
            key = f"follow/{index % 5}/{index}"
            store.put(key, [b"x"])
            there.add(key)
            if index % 3 == 2:
                gone = f"follow/{(index - 1) % 5}/{index - 1}"
                store.delete(gone)
                there.remove(gone)
            assert set(store.list("follow/")) == there, f"after {index + 1} puts"
        for key in sorted(key for key in there if key.startswith("follow/0/")):
            store.delete(key)
        assert list(store.list("follow/0/")) == []
        assert {"1", "2", "3", "4"} <= set(store.folders("follow/"))  # an empty one may stay

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

    def test_closing_twice_is_no_error(self, store: Store) -> None:
        store.put("closed", [b"x"])
        store.close()
        store.close()
