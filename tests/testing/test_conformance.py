"""The conformance suite bites: a store with one flaw fails the test that is about it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from resilient.errors import NotFoundError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.testing.conformance import StoreConformance
from resilient.testing.faulty_store import Fault, FaultyStore, Mode


class TestAFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, FaultyStore)
        store.crash()
        return FaultyStore(store.inner)


class NeitherNor(MemoryStore):
    capabilities = Capabilities(conditional_create=False, atomic_put=False, ranged_read=True)


class CheckThenPut(MemoryStore):
    """Looks and then writes, and claims that only one can win."""

    def create(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except NotFoundError:
            time.sleep(0.01)  # a round trip
            self.put(key, [data])
            return True


class LocksForItself(MemoryStore):
    """Decides between the threads of one instance only."""

    def __init__(self, place: MemoryStore) -> None:
        super().__init__()
        self.place = place
        self._objects = place._objects
        self.seen: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if (mine := self.seen.setdefault(key, self._objects.get(key, data))) != data:
                return False
        time.sleep(0.01)
        self.put(key, [data])
        return mine == data


class InTwoPieces(MemoryStore):
    """Shows the first half of a put for a moment, and claims to be atomic."""

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        content = b"".join(parts)
        super().put(key, [content[: len(content) // 2]])
        time.sleep(0.005)
        super().put(key, [content])


class LateListing(MemoryStore):
    """Lists a new key from the second look on."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    def list(self, prefix: str) -> Iterator[str]:
        keys = set(super().list(""))
        shown = keys & self.known
        self.known = keys
        return (key for key in shown if key.startswith(prefix))


class Undead(MemoryStore):
    """Never takes a key again that was deleted, as some stores do for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: set[str] = set()

    def create(self, key: str, data: bytes) -> bool:
        return key not in self.deleted and super().create(key, data)

    def delete(self, key: str) -> None:
        self.deleted.add(key)
        super().delete(key)


class Small(MemoryStore):
    """Keeps the first 16 MiB."""

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        super().put(key, [b"".join(parts)[: 16 << 20]])


def lossy(verb: str) -> Callable[[], Store]:
    return lambda: FaultyStore(
        MemoryStore(), Fault(mode=Mode.DROP_UNSYNCED, verbs=frozenset({verb}), key="kept/*", times=None)
    )


def listing(mode: Mode) -> Callable[[], Store]:
    return lambda: FaultyStore(MemoryStore(), Fault(mode=mode, times=None))


def after_a_crash(store: Store) -> Store:
    assert isinstance(store, FaultyStore)
    store.crash()
    return store


def two_of(store: Store) -> Store:
    assert isinstance(store, LocksForItself)
    return LocksForItself(store.place)


FLAWS: list[tuple[str, Callable[[], Store], Callable[[Store], Store] | None, str]] = [
    ("loses acknowledged puts", lossy("put"), after_a_crash, "what_was_acknowledged_is_still_there_after_reopening"),
    (
        "loses acknowledged creates",
        lossy("create"),
        after_a_crash,
        "what_was_acknowledged_is_still_there_after_reopening",
    ),
    (
        "loses acknowledged deletes",
        lossy("delete"),
        after_a_crash,
        "what_was_acknowledged_is_still_there_after_reopening",
    ),
    ("claims atomic creates", CheckThenPut, None, "of_many_creates_at_once_exactly_one_wins"),
    (
        "decides within one instance",
        lambda: LocksForItself(MemoryStore()),
        two_of,
        "of_many_creates_at_once_exactly_one_wins",
    ),
    ("claims atomic puts", InTwoPieces, None, "a_reader_sees_an_object_whole_or_not_at_all"),
    ("lists late", LateListing, None, "listings_follow_puts_and_deletes"),
    ("lists stale", listing(Mode.STALE_LIST), None, "listings_follow_puts_and_deletes"),
    ("takes no key twice", Undead, None, "a_deleted_object_can_be_stored_anew"),
    ("cuts large objects", Small, None, "a_large_object_comes_back_as_it_was"),
    ("reads short", listing(Mode.SHORT_READ), None, "what_was_put_is_read_whole"),
    ("flips bits", listing(Mode.CORRUPT_READ), None, "any_range_is_read_into_place"),
]


@pytest.mark.parametrize(("make", "reopen", "test"), [flaw[1:] for flaw in FLAWS], ids=[flaw[0] for flaw in FLAWS])
def test_a_flaw_fails_the_test_that_is_about_it(
    make: Callable[[], Store], reopen: Callable[[Store], Store] | None, test: str
) -> None:
    suite = StoreConformance()
    if reopen is not None:
        suite.reopen = reopen  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError):
        getattr(suite, f"test_{test}")(make())


def test_what_is_not_declared_is_skipped() -> None:
    suite = StoreConformance()
    for test in ("of_many_creates_at_once_exactly_one_wins", "a_reader_sees_an_object_whole_or_not_at_all"):
        with pytest.raises(pytest.skip.Exception, match="does not promise"):
            getattr(suite, f"test_{test}")(NeitherNor())
    with pytest.raises(pytest.skip.Exception, match="no other instance"):
        suite.test_what_was_acknowledged_is_still_there_after_reopening(MemoryStore())


def test_a_good_store_passes_with_two_instances(tmp_path: Path) -> None:
    class Suite(StoreConformance):
        def reopen(self, store: Store) -> Store:
            return LocalStore(store.url)

    for test in ("another_instance_reads_what_was_just_written", "of_many_creates_at_once_exactly_one_wins"):
        getattr(Suite(), f"test_{test}")(LocalStore(tmp_path / test))


def test_a_third_party_can_run_it_in_a_suite_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        """
import pytest
from resilient.store.memory import MemoryStore
from resilient.testing import StoreConformance


class Forgetful(MemoryStore):
    def delete(self, key):
        pass


class TestMine(StoreConformance):
    @pytest.fixture
    def store(self):
        return Forgetful()
"""
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-k",
        "deleted or empty",
        "test_mine.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout
    assert "FAILED test_mine.py::TestMine::test_a_deleted_object_is_gone" in done.stdout
    # The plain asserts of the suite explain themselves, as those of a test module do.
    assert "At index 0 diff" in done.stdout or "Left contains" in done.stdout, done.stdout
