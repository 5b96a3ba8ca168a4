from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from resilient.catalog.doctor import Finding, examine
from resilient.cli.doctor import doctor
from resilient.clock import SystemClock
from resilient.errors import ErrorKind, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store
from resilient.store.fsspec_store import FsspecStore
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.store.retrying import Retrying
from resilient.testing.faulty_store import Fault, FaultyStore, Mode
from tests.s3_server import S3Server
from tests.store.conformance import names_in


class Twice(MemoryStore):
    """Tells every writer that it won, as servers do that ignore conditions."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, [data])
        return True


class Stale(MemoryStore):
    """Answers the first read of an object for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self.seen.setdefault(key, super().get(key))


class ShortListing(MemoryStore):
    """Lists one page only."""

    def list(self, prefix: str) -> Iterator[str]:
        return iter(list(super().list(prefix))[:20])


class Padding(MemoryStore):
    """Fills with zeros what is not there."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        content = self.get(key)[start : start + into.nbytes]
        into[:] = content.ljust(into.nbytes, b"\0")


class Immortal(MemoryStore):
    def delete(self, key: str) -> None:
        pass


class Mangling(MemoryStore):
    """Takes ``+`` for a blank, as forms do."""

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        super().put(key.replace("+", " "), parts)

    def get(self, key: str) -> bytes:
        return super().get(key.replace("+", " "))


class Denying(MemoryStore):
    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        raise StoreError("put is denied", kind=ErrorKind.ACCESS_DENIED, hint="ask for it")


class Unpromising(MemoryStore):
    capabilities = Capabilities(conditional_create=False, atomic_put=True, ranged_read=True)


class Careless(Unpromising):
    """Decides nothing: whoever comes overwrites, and believes to have won."""

    def create(self, key: str, data: bytes) -> bool:
        if key in self.list(""):
            return self.get(key) == data
        time.sleep(0.05)  # all who race have looked by then
        self.put(key, [data])
        return True


class Late(SystemClock):
    """Deadlines pass at once; for stores that would be waited for."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def monotonic(self) -> float:
        return self.elapsed_s

    def sleep(self, duration_s: float) -> None:
        self.elapsed_s += duration_s


def bad(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.name: finding.promise for finding in findings if not finding.ok}


@pytest.mark.parametrize("place", ["memory://test-doctor", "{}/new"])
def test_a_good_store_passes_and_nothing_stays(place: str, tmp_path: Path) -> None:
    store = open_store(place.format(tmp_path))
    store.put("theirs", [b"x"])
    findings = examine(store)
    assert bad(findings) == {}
    assert list(store.list("")) == ["theirs"]
    store.delete("theirs")
    assert names_in(tmp_path) == []


@pytest.mark.s3
def test_a_real_s3_server_passes_and_nothing_stays(s3_server: S3Server) -> None:
    store = open_store(s3_server.fresh_url(), storage_options=s3_server.options())
    findings = examine(store)
    assert bad(findings) == {}, findings
    assert list(store.list("")) == []
    assert next(finding for finding in findings if finding.name == "clock").detail == "agrees with this machine's"


@pytest.mark.parametrize(
    ("make", "breaks"),
    [
        (Twice, {"create-if-absent under a race": "G12", "create recognizes its own": "G1", "delete": "ok"}),
        (Stale, {"read after write": "G1"}),
        (ShortListing, {"list after write": "G11"}),
        (Padding, {"ranged read": "G2"}),
        (Immortal, {"delete": "G11", "clean-up": "G11"}),
        (Mangling, {"unusual names": "G1"}),
    ],
    ids=["two winners", "stale reads", "one page", "padding", "no deletes", "mangled names"],
)
def test_a_store_that_breaks_a_promise_is_found_out(make: Callable[[], Store], breaks: dict[str, str]) -> None:
    found = bad(examine(make(), clock=Late()))
    assert found == {name: promise for name, promise in breaks.items() if promise != "ok"}


@pytest.mark.parametrize(
    "make",
    [Unpromising, Careless, lambda: FsspecStore(MemoryFileSystem(), "/test-doctor")],
    ids=["no promise", "two winners", "fsspec"],
)
def test_a_store_without_create_if_absent_works_and_says_what_it_cannot_guarantee(make: Callable[[], Store]) -> None:
    findings = examine(make())
    assert bad(findings) == {}
    (limited,) = [finding for finding in findings if finding.limited]
    assert (limited.name, limited.promise) == ("create-if-absent under a race", "G12")
    assert "safe for one launch of a run at a time" in limited.detail
    assert "both may believe that they won" in limited.detail


LOSSES = Fault(mode=Mode.DROP_UNSYNCED, verbs=frozenset({"put", "create"}), key="*/kept/*", times=None)


@pytest.mark.parametrize(
    "fault",
    [LOSSES, replace(LOSSES, at=7, times=1), replace(LOSSES, verbs=frozenset({"create"}))],
    ids=["all", "one of them", "creates"],
)
def test_a_store_that_loses_acknowledged_writes_is_found_out(fault: Fault) -> None:
    def after_a_crash() -> Store:
        store.crash()
        return store

    store = FaultyStore(MemoryStore(), fault)
    findings = examine(store, reopen=after_a_crash)
    assert bad(findings) == {"acknowledged writes stay": "G1"}
    (found,) = [finding for finding in findings if not finding.ok]
    assert "the store loses acknowledged writes" in found.detail
    assert "a step that was reported as saved may be gone or torn" in found.detail


def test_a_store_that_forgets_at_once_is_found_out_without_another_connection() -> None:
    class Forgetful(MemoryStore):
        """Keeps the newest few objects, as a cache does."""

        def put(self, key: str, parts: Sequence[BytesLike]) -> None:
            super().put(key, parts)
            for old in list(self.list(""))[:-8]:
                self.delete(old)

    assert bad(examine(Forgetful(), clock=Late()))["acknowledged writes stay"] == "G1"


def test_without_access_there_is_one_finding_that_says_why() -> None:
    (finding,) = examine(Denying())
    assert finding == Finding(name="access", ok=False, detail="put is denied (ask for it)", promise="G15")


def test_a_skewed_clock_is_only_a_warning(tmp_path: Path) -> None:
    class Skewed(SystemClock):
        def now(self) -> datetime:
            return datetime.now(UTC) + timedelta(minutes=5)

    findings = examine(open_store(tmp_path), clock=Skewed())
    assert bad(findings) == {}
    assert findings[-2].name == "clock"
    assert findings[-2].detail.startswith("warning: ")


def test_what_was_written_goes_also_when_a_check_fails_in_an_unforeseen_way() -> None:
    class Buggy(MemoryStore):
        def read_into(self, key: str, start: int, into: memoryview) -> None:
            raise RuntimeError("a bug")

    store = Buggy()
    with pytest.raises(RuntimeError):
        examine(store)
    assert list(store.list("")) == []


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[tuple[int, int]] = []
    examine(MemoryStore(), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, told[0][1]) for done in range(told[0][1] + 1)]


def test_the_command_says_ok_for_a_good_place(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"{tmp_path} can be trusted" in result.output
    document = json.loads(CliRunner().invoke(doctor, [str(tmp_path), "--json"]).output)
    assert document["ok"] is True
    assert document["url"] == str(tmp_path)
    assert {"name", "ok", "detail", "promise", "limited"} == set(document["findings"][0])
    assert names_in(tmp_path) == []


def test_the_command_ends_with_13_and_names_the_promise(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(doctor, [str(tmp_path / "file")])
    assert result.exit_code == 13
    assert "does not keep G15" in result.output
    result = CliRunner().invoke(doctor, [str(tmp_path / "file"), "--json"])
    assert result.exit_code == 13
    assert json.loads(result.output)["findings"][0]["promise"] == "G15"


def test_the_command_names_what_a_store_without_create_if_absent_cannot_guarantee() -> None:
    place = "fsspec-memory://test-doctor-cli"
    register_implementation("fsspec-memory", MemoryFileSystem, clobber=True)
    result = CliRunner().invoke(doctor, [place])
    assert result.exit_code == 0, result.output
    assert "limits G12" in result.output
    assert "can be trusted with one launch of a run at a time" in result.output
    assert "cannot guarantee G12 if several run at once" in result.output


def test_the_command_says_that_a_store_loses_acknowledged_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryStore(), LOSSES)
    opened: list[Retrying] = []

    def opening(place: str) -> Retrying:
        if opened:
            store.crash()
        opened.append(open_store(store))
        return opened[-1]

    monkeypatch.setattr("resilient.cli.doctor.open_store", opening)
    result = CliRunner().invoke(doctor, ["memory://lossy"])
    assert result.exit_code == 13, result.output
    assert "breaks G1 " in result.output
    assert "loses acknowledged writes" in result.output
    assert "does not keep G1: no run is safe there" in result.output
    assert len(opened) == 2


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "resilient.cli.main", "doctor", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "resilient.catalog.doctor" in said.stderr
    assert "| torch" not in said.stderr
