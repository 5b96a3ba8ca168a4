"""Which saves are being finished on this machine: only those of writers that live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient.errors import ErrorKind
from resilient.writer.messages import Answer, Committed, Failed, Fault, Open, Persisted, Save
from resilient.writer.presence import Presence, in_flight


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the files of this test are."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"resilient-{os.getuid()}"


def opened(run_id: str = "run/../1", **members: Any) -> Open:
    known: dict[str, Any] = {"rank": 1, "world_size": 4, "generation": 3, "nonce": "f" * 16}
    return Open(url="", options={"key": "secret"}, run_id=run_id, commit_timeout_s=1.0, **(known | members))


def order(step: int) -> Save:
    return Save(structure=1, slot=0, sequence=2, step=step, reason="", values=())


def shown(run_id: str = "run/../1") -> list[tuple[int, str]]:
    return [(each.step, each.phase) for each in in_flight(run_id)]


def test_a_save_is_listed_from_its_promise_to_its_outcome(folder: Path) -> None:
    assert shown() == []
    presence = Presence(opened())
    assert shown() == []
    presence.promise(order(10))
    presence.promise(order(20))
    assert shown() == [(10, "persisting"), (20, "persisting")]
    presence.follow(Persisted(step=10, slot=0, nbytes=1, sent=1, cpu_s=0.0))
    assert shown() == [(10, "committing"), (20, "persisting")]
    fault = Fault(name="StoreError", message="", kind=ErrorKind.IO)
    outcomes: list[Answer] = [
        Committed(step=10, nbytes=1),
        Failed(step=20, slot=0, persisted=False, error=fault),
    ]
    for answer in outcomes:
        presence.follow(answer)
    assert shown() == []
    presence.close()
    assert list(folder.iterdir()) == []


def test_each_run_sees_its_own_and_all_of_its_ranks() -> None:
    presences = [Presence(opened(rank=rank)) for rank in range(3)]
    other = Presence(opened("another run"))
    for rank, presence in enumerate([*presences, other]):
        presence.promise(order(10 + rank))
    found = in_flight("run/../1")
    assert sorted((each.step, each.rank, each.world_size, each.generation) for each in found) == [
        (10 + rank, rank, 4, 3) for rank in range(3)
    ]
    assert {each.nonce for each in found} == {"f" * 16}
    assert shown("another run") == [(13, "persisting")]
    for presence in [*presences, other]:
        presence.close()


def test_what_a_killed_writer_had_in_hand_is_listed_no_more_and_its_file_goes(folder: Path) -> None:
    program = """
import signal, sys
from tests.writer.test_presence import Presence, opened, order
presence = Presence(opened())
presence.promise(order(10))
print("ready", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        assert shown() == [(10, "persisting")]
        assert shown() == [(10, "persisting")], "looking takes nothing away"
        os.kill(writer.pid, signal.SIGKILL)
    assert len(list(folder.iterdir())) == 1
    (folder / "of-another-run").touch()
    assert shown() == []
    assert list(folder.iterdir()) == []


def test_a_file_that_is_being_written_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence(opened())
    presence.promise(order(10))
    torn = iter([True, True, False])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, nbytes, at: pread(file, nbytes - 7 * next(torn), at))
    assert shown() == [(10, "persisting")]
    presence.close()


def test_nothing_secret_is_in_the_file_and_nobody_else_may_read_it(folder: Path) -> None:
    presence = Presence(opened())
    presence.promise(order(10))
    (path,) = folder.iterdir()
    assert "secret" not in path.read_text()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    presence.close()


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_a_place_that_others_could_write_to_is_not_trusted(folder: Path, tmp_path: Path, what: str) -> None:
    if what == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(PermissionError):
        Presence(opened())
    assert shown() == []
