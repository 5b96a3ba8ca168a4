from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.store.base import Store
from resilient.store.fsspec_store import FsspecStore
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store, recipe
from resilient.store.probe import probe
from resilient.store.recipe import Recipe
from resilient.store.retrying import Retrying
from tests.store.conformance import names_in


def test_paths_and_file_urls_are_directories(tmp_path: Path) -> None:
    for place in (
        tmp_path / "a b",
        str(tmp_path / "a b"),
        f"file://{tmp_path}/a%20b",
        f"file://localhost{tmp_path}/a b",
    ):
        store = open_store(place)
        assert isinstance(store.inner, LocalStore)
        assert store.url == str(tmp_path / "a b")
    assert not (tmp_path / "a b").exists(), "opening makes nothing"


def test_a_memory_url_is_one_place_per_name() -> None:
    open_store("memory://test-open").put("key", [b"x"])
    assert open_store("memory://test-open").get("key") == b"x"
    assert list(open_store("memory://test-open-other").list("")) == []


def test_other_urls_go_to_fsspec(tmp_path: Path) -> None:
    store = open_store(f"asyncwrapper://{tmp_path}", storage_options={"fs": _local()})
    assert isinstance(store.inner, FsspecStore)


def _local() -> object:
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem()


def test_a_store_gets_retries_once() -> None:
    inner = MemoryStore()
    store = open_store(inner)
    assert isinstance(store, Retrying)
    assert store.inner is inner
    assert open_store(store) is store


def test_a_recipe_is_what_another_process_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("runs/a", Path("runs/a"), LocalStore("runs/a"), open_store("runs/a").within(1.0)):
        found = recipe(open_store(place))
        assert found == Recipe(url=str(tmp_path / "runs" / "a"), options={})
    options = {"key": "a", "secret": "b", "client_kwargs": {"region_name": "x"}}
    assert recipe(open_store("s3://bucket/run", storage_options=options)) == Recipe(
        url="s3://bucket/run", options=options
    )


def test_what_only_this_process_has_gets_no_recipe(tmp_path: Path) -> None:
    class Special(LocalStore):
        """May do anything."""

    assert recipe(open_store("memory://test-recipe")) is None
    assert recipe(open_store(MemoryStore())) is None
    assert recipe(open_store(Special(tmp_path))) is None
    assert recipe(MemoryStore()) is None
    assert recipe(open_store(f"asyncwrapper://{tmp_path}", storage_options={"fs": _local()})) is None


@pytest.mark.parametrize(
    ("place", "kind", "says"),
    [
        ("s4://bucket/run", ErrorKind.UNKNOWN_SCHEME, r"s4://.*s3://"),
        ("s3:/bucket/run", ErrorKind.UNKNOWN_SCHEME, r"write s3://bucket/run"),
        ("nothing-like-that://x", ErrorKind.UNKNOWN_SCHEME, r"nothing-like-that://"),
        ("box://x", ErrorKind.MISSING_EXTRA, r"boxfs"),
        ("s3:///run", ErrorKind.INVALID_ARGUMENT, r"bucket"),
        ("s3://key:secret@bucket/run", ErrorKind.INVALID_ARGUMENT, r"credentials belong"),
        ("file://host/run", ErrorKind.INVALID_ARGUMENT, r"names the host 'host'.*file:///host/run"),
        ("", ErrorKind.INVALID_ARGUMENT, r"empty"),
        (7, ErrorKind.INVALID_ARGUMENT, r"not int"),
    ],
)
def test_a_wrong_place_is_told_at_once(place: str, kind: ErrorKind, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(place)
    assert caught.value.kind is kind
    message = f"{caught.value} {caught.value.hint}"
    assert re.search(says, message), message
    assert "secret@" not in message


def test_options_that_nobody_would_look_at_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no storage options, got key"):
        open_store(tmp_path, storage_options={"key": "x"})


def test_a_local_store_needs_no_client_of_others(tmp_path: Path) -> None:
    code = (
        "import sys; from resilient.store.open import open_store; from resilient.store.probe import probe\n"
        f"probe(open_store({str(tmp_path)!r}))\n"
        "print(sorted({'fsspec', 's3fs', 'botocore', 'obstore', 'torch', 'rich'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("place", ["memory://test-probe", "{}/new/run"])
def test_a_probe_leaves_nothing_behind(place: str, tmp_path: Path) -> None:
    store = open_store(place.format(tmp_path))
    probe(store)
    assert list(store.list("")) == []
    assert names_in(tmp_path) == []


def test_a_probe_names_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory") as caught:
        probe(open_store(tmp_path / "file"))
    assert "a file is where a directory should be" in str(caught.value.hint)


def test_a_probe_names_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def read_only(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *arguments)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        probe(open_store(tmp_path))
    assert caught.value.kind is ErrorKind.ACCESS_DENIED


class Forgetful(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        return True


class Unconditional(MemoryStore):
    """Ignores the condition of a create, as some S3 servers do."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, [data])
        return True


@pytest.mark.parametrize(
    ("store", "says"), [(Forgetful(), "does not give back"), (Unconditional(), "lets a second writer replace")]
)
def test_a_probe_notices_a_store_that_cannot_be_trusted(store: Store, says: str) -> None:
    with pytest.raises(StoreError, match=says) as caught:
        probe(store)
    assert caught.value.kind is ErrorKind.UNTRUSTWORTHY_STORE
