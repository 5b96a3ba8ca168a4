from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from resilient.errors import ErrorKind, NotFoundError, StoreError
from resilient.store.base import Store
from resilient.store.local import TEMPORARY, LocalStore
from resilient.testing.processes import full_disk
from tests.store.conformance import StoreConformance, names_in, together


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "made" / "with the first object")

    def reopen(self, store: Store) -> Store:
        return LocalStore(store.url)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_relative_path_stays_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    monkeypatch.chdir("/")
    store.put("key", [b"x"])
    assert (tmp_path / "run" / "key").read_bytes() == b"x"
    assert store.url == str(tmp_path / "run")


def test_buffers_are_written_in_full_though_the_system_takes_them_in_bites(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 7
    draw = random.Random(seed)
    writev = os.writev

    def bite(file: int, buffers: list[memoryview]) -> int:
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        some = buffers[: draw.randint(1, len(buffers))]
        return writev(file, [*some[:-1], some[-1][: draw.randint(1, some[-1].nbytes)]])

    monkeypatch.setattr(os, "writev", bite)
    parts = [draw.randbytes(draw.randint(0, 9)) for _ in range(5_000)]
    store.put("key", parts)
    assert store.get("key") == b"".join(parts), f"seed {seed}"


def test_reads_go_on_after_a_short_answer(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: preadv(file, [buffers[0][:3]], start))
    store.put("key", [b"0123456789"])
    assert store.get("key") == b"0123456789"
    into = bytearray(7)
    store.read_into("key", 2, memoryview(into))
    assert into == b"2345678"


@pytest.mark.parametrize("verb", ["put", "create"])
def test_an_object_is_durable_before_it_has_its_name_and_the_name_before_the_call_returns(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    done: list[str] = []

    def record(name: str) -> None:
        original = getattr(os, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            first = arguments[0]
            target = str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else str(first)
            kind = "temporary" if TEMPORARY in target else os.path.relpath(target, store.root)
            done.append(f"{name} {kind}")
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, recorded)

    for name in ("fsync", "replace", "link", "mkdir"):
        record(name)
    if verb == "put":
        store.put("a/b/key", [b"x"])
    else:
        store.create("a/b/key", b"x")
    publish = {"put": "replace temporary", "create": "link temporary"}[verb]
    assert [each for each in done if each != "fsync ."][-3:] == ["fsync temporary", publish, "fsync a/b"]
    assert done.index("mkdir a") < done.index("fsync .", done.index("mkdir a")) < done.index("mkdir a/b")
    assert done.index("mkdir a/b") < done.index("fsync a") < done.index("fsync temporary")


def test_directories_that_another_process_made_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).put("a/b/theirs", [b"x"])
    synced: list[Path] = []
    fsync = os.fsync

    def record(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    LocalStore(tmp_path).put("a/b/ours", [b"x"])
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


@pytest.mark.parametrize("call", ["writev", "fsync", "replace", "link"])
def test_a_call_that_fails_leaves_the_old_object_and_no_debris(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put("folder/key", [b"old"])

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=r"of 'folder/\w+' failed at .*folder/\w+: Input/output error") as caught:
            store.create("folder/new", b"x") if call == "link" else store.put("folder/key", [b"new"])
        assert caught.value.retryable
    assert list(store.list("")) == ["folder/key"]
    assert store.get("folder/key") == b"old"
    assert names_in(store.root / "folder") == ["key"]


KILLED = """
import os, signal, sys
from resilient.store.local import LocalStore
def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], die)
LocalStore(sys.argv[1]).{call}
"""


@pytest.mark.parametrize(
    ("call", "dies_in"),
    [
        ("put('folder/key', [b'new'])", "writev"),
        ("put('folder/key', [b'new'])", "fsync"),
        ("put('folder/key', [b'new'])", "replace"),
        ("create('folder/other', b'new')", "fsync"),
        ("create('folder/other', b'new')", "link"),
    ],
)
def test_a_killed_writer_leaves_only_what_nobody_sees(store: LocalStore, call: str, dies_in: str) -> None:
    store.put("folder/key", [b"old"])
    killed = [sys.executable, "-c", KILLED.format(call=call), str(store.root), dies_in]
    assert subprocess.run(killed, timeout=60, check=False).returncode == -9
    assert list(store.list("")) == ["folder/key"]
    assert list(store.folders("")) == ["folder"]
    assert store.get("folder/key") == b"old"
    assert store.create("folder/other", b"after"), "a torn create does not block the key"
    leftovers = set(names_in(store.root / "folder")) - {"key", "other"}
    assert all(name.startswith(TEMPORARY) for name in leftovers)


@pytest.mark.field_report("BR-007")
def test_unfinished_files_are_swept_when_nobody_has_written_to_them_for_long(store: LocalStore) -> None:
    store.put("folder/key", [b"x"])
    names = [f"{TEMPORARY}4711-{number:016x}" for number in range(2)]
    for name in (*names, f"{TEMPORARY}of somebody else"):
        path = store.root / "folder" / name
        path.write_bytes(b"half")
        if name != names[1]:
            os.utime(path, (1_000, 1_000))
    assert store.sweep(datetime.now(UTC) - timedelta(hours=1)) == 1
    assert names_in(store.root / "folder") == [names[1], f"{TEMPORARY}of somebody else", "key"]
    assert LocalStore(store.root / "nothing").sweep(datetime.now(UTC)) == 0


@pytest.mark.field_report("BR-141")
def test_the_space_that_is_told_is_that_of_the_disk_which_is_full() -> None:
    with full_disk(8 << 20) as place:
        if place.how != "mount":
            pytest.skip("this process may not mount")
        store = LocalStore(place.path / "a" / "run")
        first = os.urandom(5 << 20)
        store.put("first", [first])
        with pytest.raises(StoreError) as caught:
            store.put("second", [bytes(5 << 20)])
        assert caught.value.kind is ErrorKind.NO_SPACE
        told = re.search(r"\(5,242,880 bytes needed, ([\d,]+) free\)", str(caught.value))
        assert told, caught.value
        assert 2 << 20 < int(told[1].replace(",", "")) <= 3 << 20
        assert store.get("first") == first
        assert names_in(store.root) == ["first"]


@pytest.mark.field_report("BR-140", "BR-141")
def test_a_full_disk_says_what_was_needed_and_what_is_free(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):

        def full(file: int, buffers: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "writev", full)
        with pytest.raises(StoreError, match=r"key.* \(12,345 bytes needed, [\d,]+ free\)") as caught:
            store.put("key", [b"x" * 12_345])
        assert caught.value.kind is ErrorKind.NO_SPACE
        assert not caught.value.retryable


@pytest.mark.parametrize(
    ("number", "kind", "retryable"),
    [
        (errno.EACCES, ErrorKind.ACCESS_DENIED, False),
        (errno.EROFS, ErrorKind.ACCESS_DENIED, False),
        (errno.ESTALE, ErrorKind.IO, True),
        (errno.ENAMETOOLONG, ErrorKind.IO, False),
    ],
)
def test_errors_of_the_system_are_classified(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int, kind: ErrorKind, retryable: bool
) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    calls: tuple[Callable[[], object], ...] = (lambda: store.put("key", [b"x"]), lambda: store.get("key"))
    for call in calls:
        with pytest.raises(StoreError, match=os.strerror(number)) as caught:
            call()
        assert (caught.value.kind, caught.value.retryable) == (kind, retryable)


@pytest.mark.field_report("BR-023")
def test_without_hard_links_a_create_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="no hard links") as caught:
        store.create("key", b"x")
    assert caught.value.kind is ErrorKind.UNTRUSTWORTHY_STORE


def test_a_file_where_a_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"file.*Not a directory"):
        store.put("a/key", [b"x"])
    with pytest.raises(StoreError, match="Not a directory"):
        list(store.list(""))
    with pytest.raises(NotFoundError):
        store.get("a/key")


def test_threads_that_tidy_up_do_not_hurt_threads_that_write(store: LocalStore) -> None:
    def churn(index: int) -> None:
        for turn in range(40):
            store.put(f"a/b/{index}", [b"%d" % turn])
            assert store.get(f"a/b/{index}") == b"%d" % turn
            store.delete(f"a/b/{index}")

    together(4, churn)
    assert list(store.list("")) == []


def test_directories_that_the_store_made_go_with_their_last_object(store: LocalStore) -> None:
    store.put("a/b/c/key", [b"x"])
    store.put("a/key", [b"x"])
    store.delete("a/b/c/key")
    assert names_in(store.root / "a") == ["key"]
    store.put("a/b/c/key", [b"again"])
    assert store.get("a/b/c/key") == b"again"
    store.delete("a/key")
    store.delete("a/b/c/key")
    assert names_in(store.root) == []


def test_directories_that_others_made_stay(store: LocalStore) -> None:
    (store.root / "theirs").mkdir()
    store.put("theirs/key", [b"x"])
    store.delete("theirs/key")
    assert names_in(store.root) == ["theirs"]


def test_a_directory_that_another_process_tidies_away_in_between_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_and_gone = iter([True])
    make = Path.mkdir

    def mkdir(self: Path, *args: Any, **keywords: Any) -> None:
        if self.name == "control" and next(there_and_gone, False):
            raise FileExistsError(17, "File exists", str(self))
        make(self, *args, **keywords)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    store = LocalStore(tmp_path / "run")
    assert store.create("control/probe", b"x")
    assert store.get("control/probe") == b"x"


def test_processes_that_make_and_tidy_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    def work(number: int) -> None:
        store = LocalStore(tmp_path / "run")  # one of its own, as every process has
        for turn in range(100):
            key = f"control/probe-{number}-{turn}"
            assert store.create(key, b"x")
            store.delete(key)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
