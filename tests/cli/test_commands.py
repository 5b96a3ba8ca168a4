"""The command line from end to end, inside this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from resilient.catalog.line import read_line
from resilient.catalog.verify import verify
from resilient.cli import main as main_module
from resilient.cli.main import main
from resilient.format.documents import Claim
from resilient.store.local import LocalStore
from tests.catalog.runs import attempt_of, new_generation, save
from tests.cli.calling import call, called


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    """Make ``tmp_path/run``: steps 1, 2, 3 of one generation on two ranks."""
    store = LocalStore(tmp_path / "run")
    made = new_generation(store)
    for step in (1, 2, 3):
        save(store, made, step)
    return made


@pytest.fixture
def run(tmp_path: Path, claim: Claim) -> Path:
    return tmp_path / "run"


def flip(path: Path, *, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.field_report("BR-221")
def test_ls_lists_newest_first(run: Path, claim: Claim) -> None:
    LocalStore(run).put(attempt_of(claim, 2).mark("pinned", "release"), [b""])
    found = called("ls", run)
    assert found["run"] == str(run)
    assert [one["step"] for one in found["checkpoints"]] == [3, 2, 1]
    newest = found["checkpoints"][0]
    assert set(newest) == {"step", "generation", "created", "nbytes", "world_size", "items", "marks"}
    assert newest["created"].endswith("Z")
    assert (newest["generation"], newest["world_size"], sorted(newest["items"])) == (1, 2, ["model", "rng"])
    assert [one["marks"] for one in found["checkpoints"]] == [[], ["pinned"], []]
    lines = call("ls", run).stdout.splitlines()
    assert lines[0].split()[:2] == ["step", "generation"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]
    assert "pinned" in lines[2]


def test_show_says_what_is_inside(run: Path) -> None:
    found = called("show", f"{run}@2")
    assert (found["step"], found["run"]) == (2, str(run))
    tensors = {(one["item"], one["name"], one["rank"]): one for one in found["tensors"]}
    w = tensors["model", "w", None]
    assert (w["dtype"], w["shape"], w["nbytes"]) == ("float32", [6, 4], 96)
    assert tensors["model", "tied", None]["alias"] == "b"
    assert ("rng", "state", 1) in tensors
    text = call("show", run).stdout
    assert "step 3 of" in text
    assert "6x4" in text
    assert "tied to b" in text
    assert "rank 1" in text


def test_show_limits_its_rows_unless_all_are_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.cli import show

    monkeypatch.setattr(show, "_ROWS", 2)
    assert "and 3 more (--all shows them)" in call("show", run).stdout
    assert "more" not in call("show", run, "--all").stdout


def test_verify_of_a_sound_run_and_of_one_step(run: Path) -> None:
    assert called("verify", run)["ok"] is True
    deep = called("verify", run, "--deep")
    assert deep == {"ok": True, "checked": deep["checked"], "bad": []}
    assert deep["checked"] == sum(path.is_file() for path in run.rglob("*"))
    assert called("verify", f"{run}@2", "--deep")["ok"] is True
    result = call("verify", run, "--deep")
    assert result.stdout.startswith("ok: ")
    assert "verified: 100 %" in result.stderr


@pytest.mark.parametrize(
    "victim",
    [
        lambda claim: "run.json",
        lambda claim: "generations/00000001.json",
        lambda claim: "generations/00000001.base.json",
        lambda claim: attempt_of(claim, 3).commit,
        lambda claim: attempt_of(claim, 3).receipt(1),
        lambda claim: attempt_of(claim, 3).data(1, 0),
    ],
    ids=["run", "claim", "base", "commit", "receipt", "data"],
)
def test_a_flipped_byte_is_named_and_exits_12(run: Path, claim: Claim, victim: Callable[[Claim], str]) -> None:
    flip(run / victim(claim), at=20)
    found = called("verify", run, "--deep", code=12)
    assert found["ok"] is False
    assert [bad["object"] for bad in found["bad"]] == [victim(claim)]
    assert set(found["bad"][0]) == {"step", "object", "tensor", "rank", "why"}
    assert victim(claim) in call("verify", run, "--deep", code=12).stdout


def test_a_step_whose_commit_is_torn_is_not_listed_and_is_refused(run: Path, claim: Claim) -> None:
    flip(run / attempt_of(claim, 3).commit)
    result = call("ls", run)
    assert result.stdout.splitlines()[1].split()[0] == "2"
    assert "COMMIT" in result.stderr
    assert called("verify", f"{run}@3", code=12)["bad"][0]["object"] == attempt_of(claim, 3).commit
    assert "COMMIT" in call("restore", f"{run}@3", f"{run}-copy", code=12).stderr


def test_restore_copies_whole_and_verified(run: Path, tmp_path: Path) -> None:
    call("restore", f"{run}@2", tmp_path / "copy")
    assert [one["step"] for one in called("ls", tmp_path / "copy")["checkpoints"]] == [2]
    store = LocalStore(tmp_path / "copy")
    line = read_line(store)
    assert verify(store, line.commits, deep=True, line=line).ok
    again = call("restore", f"{run}@3", tmp_path / "copy", code=2)
    assert "holds checkpoints already" in again.stderr
    assert called("restore", run, tmp_path / "some", "--items", "rng")["items"] == ["rng"]
    assert called("ls", tmp_path / "some")["checkpoints"][0]["items"] == ["rng"]


def test_restore_of_a_damaged_step_fails_and_leaves_no_checkpoint(run: Path, claim: Claim, tmp_path: Path) -> None:
    flip(run / attempt_of(claim, 3).data(0, 0))
    for form in ("native", "safetensors"):
        found = called("restore", f"{run}@3", tmp_path / form, "--format", form, code=12)
        assert found["error"]["kind"] == "bad-digest"
        assert attempt_of(claim, 3).data(0, 0) in found["error"]["message"]
        call("ls", tmp_path / form, code=10)


def test_restore_without_a_step_takes_the_newest_that_is_whole_and_says_why(
    run: Path, claim: Claim, tmp_path: Path
) -> None:
    flip(run / attempt_of(claim, 3).data(0, 0))
    result = call("restore", run, tmp_path / "copy")
    assert [one["step"] for one in called("ls", tmp_path / "copy")["checkpoints"]] == [2]
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert "step 3 is not usable, trying step 2" in warning
    assert called("restore", run, tmp_path / "st", "--format", "safetensors")["step"] == 2
    assert sorted(path.name for path in (tmp_path / "st").iterdir()) == ["model.safetensors", "rng.safetensors"]
    said = call("restore", run, tmp_path / "st2", "--format", "safetensors").stderr
    assert "left out" in said
    assert "--format torch" in said


def test_restore_to_a_full_or_distant_place_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    for form in ("native", "safetensors", "torch"):
        found = called("restore", run, tmp_path / "mine", "--format", form, code=2)
        assert found["error"]["kind"] == "destination-not-empty"
    assert "directory of this machine" in call("restore", run, "s3://b/c", "--format", "safetensors", code=2).stderr
    assert called("restore", run, tmp_path / "x", "--items", "nope", code=10)["error"]["kind"] == "no-such-item"


def test_prune_only_says_until_it_is_told(run: Path) -> None:
    said = call("prune", run, "--keep-last", 1).stdout
    assert "would delete steps 1, 2" in said
    assert "--yes" in said
    assert len(called("ls", run)["checkpoints"]) == 3
    planned = called("prune", run, "--keep-last", 1)
    assert (planned["deleted"], sorted(planned["steps"]), planned["kept"]) == (False, [1, 2], [3])


def test_prune_frees_the_space(run: Path, claim: Claim) -> None:
    before = sum(path.stat().st_size for path in (run / "data").rglob("*") if path.is_file())
    done = called("prune", run, "--keep-last", 1, "--keep-every", 2, "--yes")
    assert (done["deleted"], done["steps"], done["kept"]) == (True, [1], [3, 2])
    after = sum(path.stat().st_size for path in (run / "data").rglob("*") if path.is_file())
    assert before - after == done["nbytes"] > 0
    assert [one["step"] for one in called("ls", run)["checkpoints"]] == [3, 2]
    assert called("verify", run, "--deep")["ok"]
    assert "deleted no checkpoint" in call("prune", run, "--keep-last", 2, "--yes").stdout


def test_prune_keeps_what_is_pinned_and_says_so(run: Path, claim: Claim) -> None:
    LocalStore(run).put(attempt_of(claim, 1).mark("pinned", "release"), [b""])
    assert called("prune", run, "--keep-last", 1)["held"] == [{"step": 1, "why": "pinned"}]
    assert "keeping step 1, which is pinned" in call("prune", run, "--keep-last", 1, "--yes").stdout


@pytest.mark.parametrize("arguments", [("--keep-last", 0), (), ("--keep-last", 1, "--grace", "soon")])
def test_prune_refuses_to_guess(run: Path, arguments: tuple[object, ...]) -> None:
    call("prune", run, *arguments, "--yes", code=2)
    assert len(called("ls", run)["checkpoints"]) == 3


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune --keep-last 1", "restore"])
@pytest.mark.field_report("BR-220")
def test_nothing_there_exits_10_and_names_what_is_near(run: Path, tmp_path: Path, command: str) -> None:
    name, *options = command.split()
    rest: list[object] = [tmp_path / "copy"] if name == "restore" else []
    result = call(name, tmp_path / "rum", *rest, *options, code=10)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert str(tmp_path / "rum") in lines[0]
    assert lines[1] == f"hint: did you mean {run}?"
    error = called(name, tmp_path / "nothing-like-it", *rest, *options, code=10)["error"]
    assert set(error) == {"kind", "message", "hint"}
    assert error["kind"] == "no-checkpoint"


@pytest.mark.field_report("BR-220")
def test_a_wrong_directory_names_the_run_in_it_or_above_it(run: Path, tmp_path: Path) -> None:
    neighbour = tmp_path.with_name(f"{tmp_path.name}-too")  # a run whose name is like the one given, and further away
    new_generation(LocalStore(neighbour))
    above = call("ls", tmp_path, code=2)
    assert f"did you mean {run}?" in above.stderr
    below = call("ls", run / "steps", code=2)
    assert f"did you mean {run}?" in below.stderr
    assert called("ls", run / "data" / "zz", code=10)["error"]["kind"] == "no-checkpoint"


def test_a_step_that_is_not_there_exits_10_and_lists_those_that_are(run: Path) -> None:
    result = call("show", f"{run}@7", code=10)
    assert "1, 2, 3" in result.stderr
    assert called("restore", f"{run}@7", f"{run}-copy", code=10)["error"]["kind"] == "no-such-step"


def test_a_run_without_a_commit_has_nothing_to_list(tmp_path: Path) -> None:
    new_generation(LocalStore(tmp_path))
    for command in ("ls", "show", "verify"):
        assert "nothing was committed" in call(command, tmp_path, code=10).stderr


def test_a_run_of_which_every_commit_is_damaged_is_corrupt_not_empty(run: Path, claim: Claim) -> None:
    for step in (1, 2, 3):
        flip(run / attempt_of(claim, step).commit)
    call("ls", run, code=12)
    call("show", run, code=12)
    assert len(called("verify", run, code=12)["bad"]) == 3


def test_a_place_with_an_at_sign_is_a_place(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "me@home")
    save(store, new_generation(store), 4)
    assert called("ls", tmp_path / "me@home")["checkpoints"][0]["step"] == 4
    assert called("show", f"{tmp_path / 'me@home'}@4")["step"] == 4


@pytest.mark.field_report("BR-220")
def test_an_unknown_scheme_is_said_in_one_line() -> None:
    result = call("ls", "s4://bucket/run", code=2)
    assert "s4" in result.stderr
    assert "Traceback" not in result.output


def test_help_teaches_with_examples() -> None:
    text = call("--help").stdout
    for command in ("ls", "show", "verify", "restore", "prune", "doctor"):
        assert command in text
        assert "Example: resilient" in call(command, "--help").stdout
    assert "resilient restore runs/gpt@9000" in text


def test_version_names_what_a_report_needs() -> None:
    text = call("--version").stdout
    assert "resilient-torch" in text
    assert "python 3." in text
    assert "torch " in text


def test_an_interrupt_exits_130(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.cli import ls

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "open_place", interrupted)
    call("ls", run, code=130)


def test_each_command_is_where_it_is_looked_for() -> None:
    for name in main_module._COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.name == name
