"""Pins, marks, adoption, the inventory and retention, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.catalog.line import read_line
from resilient.catalog.marks import FAILED, RUN, is_failed, write_mark
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.format.documents import Claim, Commit
from resilient.store.local import LocalStore
from tests.catalog.runs import attempt_of, commit_of, dead_generation, new_generation, save
from tests.cli.calling import call, called
from tests.cli.test_commands import flip

COMMANDS = (("pin",), ("unpin",), ("mark", "failed", "--why", "x"), ("adopt",))


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    """Make ``tmp_path/run``: steps 1, 2, 3 of one generation, which has ended, on two ranks."""
    store = LocalStore(tmp_path / "run")
    made = dead_generation(store)
    for step in (1, 2, 3):
        save(store, made, step)
    return made


@pytest.fixture
def run(tmp_path: Path, claim: Claim) -> Path:
    return tmp_path / "run"


def steps(run: Path) -> list[int]:
    return [one["step"] for one in called("ls", run)["checkpoints"]]


def test_what_is_pinned_is_kept_and_shown_until_it_is_unpinned(run: Path) -> None:
    assert called("pin", f"{run}@1", "--why", "released") == {"run": str(run), "step": 1, "pinned": True}
    assert "pinned" in call("ls", run).stdout.splitlines()[3]
    assert "released" in call("show", f"{run}@1").stdout
    assert called("prune", run, "--keep-last", 1, "--yes")["held"] == [{"step": 1, "why": "pinned"}]
    assert steps(run) == [3, 1]
    assert called("unpin", f"{run}@1")["removed"] == 1
    again = call("unpin", f"{run}@1")
    assert "was not pinned" in again.stderr
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [3]


def test_what_is_marked_failed_is_not_the_last_good_one(run: Path, claim: Claim) -> None:
    assert called("mark", "failed", f"{run}@3", "--why", "NaN")["mark"] == "failed"
    note = called("show", f"{run}@3")["notes"][0]
    assert (note["kind"], note["by"], note["why"]) == ("failed", "user", "NaN")
    assert called("ls", run)["checkpoints"][0]["marks"] == ["failed"]
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [3, 2]
    write_mark(LocalStore(run), attempt_of(claim, 3), FAILED, by=RUN, why="twice", clock=SYSTEM_CLOCK)
    call("mark", "good", f"{run}@3", "--why", "the data was bad")
    assert is_failed(LocalStore(run), attempt_of(claim, 3)) is None
    assert "the data was bad" in call("show", f"{run}@3").stdout


def test_a_mark_needs_a_reason(run: Path) -> None:
    assert "--why" in call("mark", "failed", f"{run}@3", code=2).stderr
    assert called("mark", "failed", f"{run}@3", code=2)["error"]["kind"] == "invalid-argument"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_that_changes_one_step_wants_it_named(run: Path, command: tuple[str, ...]) -> None:
    error = called(*command, run, code=2)["error"]
    assert f"{run}@3" in error["hint"]
    assert called(*command, f"{run}@9", code=10)["error"]["kind"] == "no-such-step"


def test_adopt_commits_what_is_complete_and_verify_and_fsck_point_to_it(run: Path, claim: Claim) -> None:
    save(LocalStore(run), claim, 4, commit=False)
    found = called("fsck", run)
    assert [(one["step"], one["kind"], one["complete"]) for one in found["apart"]] == [(4, "unfinished", True)]
    assert f"resilient adopt {run}@4" in call("fsck", run).stdout
    result = call("adopt", f"{run}@4")
    assert "is committed" in result.stdout
    assert "verified: 100 %" in result.stderr
    assert steps(run) == [4, 3, 2, 1]
    assert called("adopt", f"{run}@4", code=11)["error"]["kind"] == "already-saved"
    LocalStore(run).delete(attempt_of(claim, 4).commit)
    assert f"resilient adopt {run}@4" in call("verify", run).stderr


def test_adopt_leaves_the_living_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claim = new_generation(store)
    save(store, claim, 1)
    save(store, claim, 2, commit=False)
    assert called("adopt", f"{tmp_path}@2", code=11)["error"]["kind"] == "run-in-use"


def test_fsck_of_a_sound_run_says_what_depends_on_what_and_changes_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = called("fsck", run, "--deep")
    assert (found["ok"], found["bad"], found["unknown"], found["apart"]) == (True, [], [], [])
    assert found["steps"] == [3, 2, 1]
    assert found["kinds"]["committed"] == {
        "objects": 18,
        "nbytes": sum(len(content) for path, content in before.items() if {"steps", "data"} & {*path.parts}),
    }
    assert [(one["step"], one["takes"], one["left"]) for one in found["losses"]] == [
        (3, [3], 2),
        (2, [2], 3),
        (1, [1], 3),
    ]
    text = call("fsck", run).stdout
    assert "if step 3 were lost, the run would go on from step 2" in text
    assert text.splitlines()[-1].startswith("ok: 3 checkpoints")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.field_report("BR-229")
def test_fsck_names_every_flipped_bit_of_what_counts(run: Path) -> None:
    """One bit of each object in turn: of documents, receipts, manifests and data."""
    (run / "a stranger's").write_bytes(b"x")
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        key = str(path.relative_to(run))
        content = path.read_bytes()
        flip(path, at=len(content) // 2)
        ours = key != "a stranger's"
        found = called("fsck", run, "--deep", code=12 if ours else 0)
        assert found["ok"] is not ours, key
        assert not ours or key in {bad["object"] for bad in found["bad"]}
        path.write_bytes(content)
    assert called("fsck", run, "--deep")["unknown"] == ["a stranger's"]


def test_fsck_of_a_run_that_has_lost_its_checkpoints_exits_12(run: Path, claim: Claim) -> None:
    store = LocalStore(run)
    new_generation(store, read_line(store).at(3))
    for step in (1, 2, 3):
        store.delete(attempt_of(claim, step).commit)
    found = called("fsck", run, code=12)
    assert found["ignored"] == ["generation 2 continues step 3, and no checkpoint of the line is left"]
    assert [one["complete"] for one in found["apart"] if one["step"] == 3] == [True]


def test_fsck_of_a_run_that_never_saved_finds_nothing_wrong(tmp_path: Path) -> None:
    open_run(LocalStore(tmp_path), create=True, clock=SYSTEM_CLOCK)
    assert called("fsck", tmp_path)["ok"] is True
    assert "0 checkpoints" in call("fsck", tmp_path).stdout
    assert "looks at one" in call("fsck", f"{tmp_path}@3", code=2).stderr


def test_prune_by_time_and_by_the_best(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claim = dead_generation(store)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.2), (5, 0.4)):
        made = commit_of(store, save(store, claim, step, commit=False), metrics={"loss": loss})
        assert isinstance(made, Commit)
    assert called("show", f"{tmp_path}@2")["metrics"] == {"loss": 0.1}
    assert "loss 0.1" in call("show", f"{tmp_path}@2").stdout
    best = ("prune", tmp_path, "--keep-last", 1, "--metric", "loss", "--keep-best", 2)
    assert called(*best)["kept"] == [5, 4, 2]
    assert called(*best, "--mode", "max")["kept"] == [5, 1]
    assert called("prune", tmp_path, "--keep-last", 1, "--keep-every-time", "1h")["kept"] == [5, 1]
    assert "no checkpoint has a metric 'los'" in call(*best[:-3], "los", *best[-2:]).stderr
    assert steps(tmp_path) == [5, 4, 3, 2, 1]
    assert called(*best, "--yes")["deleted"] is True
    assert steps(tmp_path) == [5, 4, 2]


@pytest.mark.parametrize(
    "arguments",
    [("--keep-best", 2), ("--metric", "loss"), ("--keep-every-time", "soon"), ("--keep-best", 0, "--metric", "loss")],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(run: Path, arguments: tuple[object, ...]) -> None:
    assert called("prune", run, "--keep-last", 1, *arguments, "--yes", code=2)["error"]["kind"] == "invalid-argument"
    assert steps(run) == [3, 2, 1]


def test_restore_to_s3_is_whole_or_not_at_all(run: Path, claim: Claim, s3_url: str) -> None:
    call("restore", f"{run}@2", f"{s3_url}/copy")
    assert called("fsck", f"{s3_url}/copy", "--deep")["steps"] == [2]
    assert called("restore", run, f"{s3_url}/copy", code=2)["error"]["kind"] == "destination-not-empty"
    assert called("fsck", f"{s3_url}/copy", "--deep")["steps"] == [2]
    flip(run / attempt_of(claim, 3).data(1, 0))
    call("restore", f"{run}@3", f"{s3_url}/other", code=12)
    found = called("fsck", f"{s3_url}/other")
    assert (found["steps"], found["apart"]) == ([], [])
    call("restore", f"{run}@1", f"{s3_url}/other")
    assert called("verify", f"{s3_url}/other", "--deep")["ok"] is True
    assert called("pin", f"{s3_url}/other@1")["pinned"] is True
    assert called("ls", f"{s3_url}/other")["checkpoints"][0]["marks"] == ["pinned"]
