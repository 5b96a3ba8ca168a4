"""``resilient report``: the account of a run on a terminal, as JSON, and as a page."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from resilient.cli import report as command
from resilient.clock import Clock
from resilient.report.model import Ledger
from resilient.store.base import Store
from resilient.store.local import LocalStore
from tests.catalog.runs import HandClock, new_generation
from tests.cli.calling import call, called
from tests.report import ledgers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose account is the calm one: what is read from a store is for the tests of the account."""

    def account(store: Store, *, clock: Clock) -> Ledger:
        assert store.get("run.json")
        return ledgers.calm()

    new_generation(LocalStore(tmp_path / "run"))
    monkeypatch.setattr(command, "read_ledger", account)
    return tmp_path / "run"


def test_people_get_a_summary_without_color(run: Path) -> None:
    text = call("report", run).stdout
    assert text.startswith("calm has ended as planned: step 2,360, after 1 generation.\n")
    assert "98.3 % of 20 min was productive (ETTR 0.983)" in text
    assert "\x1b" not in text


def test_programs_get_the_account(run: Path) -> None:
    told = called("report", run)
    assert (told["ettr"], told["wall_s"], told["incidents"]) == (pytest.approx(1180 / 1200), 1200, [])
    assert told["parts"]["compute"] == 1000


def test_the_page_is_one_file_and_never_replaces_one_unasked(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert call("report", run, "--html", page).stdout == f"the report of {run} is in {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    assert called("report", run, "--html", page, code=11)["error"]["kind"] == "destination-not-empty"
    assert page.read_text() == "mine"
    told = called("report", run, "--html", page, "--overwrite")
    assert told["step"] == 2360
    assert page.read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report.html"}, "nothing else stays"


def test_a_file_that_came_meanwhile_stays(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"

    def account(store: Store, *, clock: Clock) -> Ledger:
        page.write_text("somebody else's")
        return ledgers.calm()

    monkeypatch.setattr(command, "read_ledger", account)
    called("report", run, "--html", page, code=11)
    assert page.read_text() == "somebody else's"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("absent/report.html", "there is no directory"),
        ("file/report.html", "is no directory"),
        (f"{'n' * 300}.html", "File name too long"),
        (f"{'n' * 300}/report.html", "name"),
    ],
)
def test_where_nothing_can_be_written_it_says_so_before_it_reads(
    page: str, said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(command, "read_ledger", None)  # calling that would be another error
    for more in ((), ("--overwrite",)):
        error = called("report", run, "--html", tmp_path / page, *more, code=2)["error"]
        assert error["kind"] == "invalid-argument"
        assert said in error["message"]
        assert "report.html" in error["hint"]
    called("report", run, "--html", tmp_path, code=11)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "file"}


def test_a_link_to_nowhere_is_in_the_way(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.symlink_to(tmp_path / "nowhere")
    called("report", run, "--html", page, code=11)
    called("report", run, "--html", page, "--overwrite")
    assert page.read_text().startswith("<!doctype html>")


def test_what_goes_wrong_with_the_folder_meanwhile_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def account(store: Store, *, clock: Clock) -> Ledger:
        folder.rmdir()
        folder.write_text("a file now")  # also what removes the part that was written fails then
        return ledgers.calm()

    monkeypatch.setattr(command, "read_ledger", account)
    error = called("report", run, "--html", folder / "report.html", code=2)["error"]
    assert "Not a directory" in error["message"]


def test_a_name_as_long_as_names_can_be(run: Path, tmp_path: Path) -> None:
    page = tmp_path / f"{'n' * 250}.html"
    call("report", run, "--html", page)
    assert page.read_text().startswith("<!doctype html>")


def test_a_file_system_without_hard_links(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    page = tmp_path / "report.html"
    call("report", run, "--html", page)
    assert page.read_text().startswith("<!doctype html>")
    page.unlink()

    def account(store: Store, *, clock: Clock) -> Ledger:
        page.write_text("somebody else's")
        return ledgers.calm()

    monkeypatch.setattr(command, "read_ledger", account)
    called("report", run, "--html", page, code=11)
    assert page.read_text() == "somebody else's"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report.html"}


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    called("report", tmp_path / "absent", code=10)
    called("report", f"{run}@3", code=2)


def test_reading_that_takes_long_says_how_far_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path / "run"), HandClock()
    store.put("a", [b"x" * 2048])
    counting = command._Counting(store, clock)
    assert counting.get("a") == b"x" * 2048
    assert capsys.readouterr().err == ""
    clock.sleep(3)
    counting.read_into("a", 0, memoryview(bytearray(1024)))
    assert capsys.readouterr().err == "progress: reading what the run has written down: 3.0 KiB\n"


def test_its_help_teaches_the_parts() -> None:
    text = call("report", "--help").stdout
    for word in ("exchange wait", "lost work", "ETTR", "--html", "Example:"):
        assert word in text
