"""What no command, and no load, takes for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import resilient
from resilient.cli.main import main
from resilient.engine.export_torch import main as export_torch
from resilient.errors import ErrorKind, NotFoundError, UsageError
from resilient.store.local import LocalStore
from tests.catalog.runs import new_generation, save


def error_of(arguments: Sequence[object], code: int) -> dict[str, str]:
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    found: dict[str, str] = json.loads(result.stdout)["error"]
    return found


@pytest.mark.field_report("BR-013")
def test_every_reader_refuses_a_step_that_was_not_committed_in_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    store = LocalStore(run)
    claim = new_generation(store)
    save(store, claim, 20)
    save(store, claim, 30, commit=False)
    commands: list[list[object]] = [["show", f"{run}@30"], ["verify", f"{run}@30"]]
    commands += [
        ["restore", f"{run}@30", tmp_path / form, "--format", form] for form in ("native", "safetensors", "torch")
    ]
    found = [error_of(command, 10) for command in commands]
    assert {error["kind"] for error in found} == {"no-such-step"}
    (message,) = {error["message"] for error in found}
    assert "30" in message
    assert all("20" in error["hint"] for error in found)
    with pytest.raises(NotFoundError) as caught:
        resilient.load(run, {"model": {"w": torch.zeros(6, 4)}}, step=30)
    assert str(caught.value) == message
    assert export_torch([str(run), "30", str(tmp_path / "export")]) == 10
    assert message in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
    listed = CliRunner().invoke(main, ["ls", str(run), "--json"])
    assert [one["step"] for one in json.loads(listed.stdout)["checkpoints"]] == [20]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.field_report("BR-205")
@pytest.mark.parametrize("tool", ["dcp", "another"])
def test_a_checkpoint_of_another_tool_is_refused_by_what_it_holds_and_left_alone(tmp_path: Path, tool: str) -> None:
    place = tmp_path / "theirs"
    if tool == "dcp":
        dcp.save({"w": torch.ones(3)}, checkpoint_id=place, no_dist=True)
    else:
        place.mkdir()
        torch.save({"w": torch.ones(3)}, place / "model.pt")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    held = ".metadata" if tool == "dcp" else "model.pt"
    attempts: list[Callable[[], object]] = [
        lambda: resilient.save(place, 1, {"model": {"w": torch.zeros(3)}}),
        resilient.train(place)(lambda run: None),
    ]
    if tool != "dcp":  # which can be read, and never written to
        error = error_of(["ls", place], 2)
        assert error["kind"] == "not-a-run"
        assert held in error["message"]
        attempts.append(lambda: resilient.load(place, {"model": {"w": torch.zeros(3)}}))
    for attempt in attempts:
        with pytest.raises(UsageError, match=held.replace(".", r"\.")) as caught:
            attempt()
        assert caught.value.kind is ErrorKind.NOT_A_RUN
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.field_report("BR-220")
def test_a_file_where_a_directory_should_be_is_said_in_one_line(tmp_path: Path, command: str, below: str) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"x")
    result = CliRunner().invoke(main, [command, str(file / below)])
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, len(lines)) == (13, "", 2)
    assert lines[0].startswith("error: ")
    assert str(file) in lines[0]
    assert lines[1].startswith("hint: a file is where a directory should be")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["nosuch"],
        ["--bogus", "ls", "RUN"],
        ["ls", "RUN", "--bogus"],
        ["ls", "RUN", "another"],
        ["prune", "RUN"],
        ["prune", "RUN", "--keep-last", "0"],
        ["restore", "RUN"],
        ["restore", "RUN", "DEST", "--format", "zip"],
        ["restore", "RUN", "DEST", "--items", ""],
        ["restore", "RUN", "DEST", "--items", " , "],
        ["restore", "RUN", "DEST@7"],
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_said_as_json_too_and_changes_nothing(tmp_path: Path, arguments: list[str]) -> None:
    store = LocalStore(tmp_path / "RUN")
    save(store, new_generation(store), 1)
    before = sorted(tmp_path.rglob("*"))
    absolute = [
        each.replace("RUN", str(tmp_path / "RUN")).replace("DEST", str(tmp_path / "DEST")) for each in arguments
    ]
    error = error_of(absolute, 2)
    assert set(error) == {"kind", "message", "hint"}
    assert error["kind"] == "invalid-argument"
    assert error["message"]
    assert error["hint"]
    for_people = CliRunner().invoke(main, absolute)
    assert (for_people.exit_code, for_people.stdout) == (2, "")
    assert for_people.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_number_too_long_for_a_step_is_part_of_the_name(tmp_path: Path) -> None:
    assert error_of(["show", f"{tmp_path}@{'9' * 5000}"], 13)["kind"] == "io"
    store = LocalStore(tmp_path / "run@20261130193500")
    save(store, new_generation(store), 1)
    assert CliRunner().invoke(main, ["ls", str(tmp_path / "run@20261130193500")]).exit_code == 0


def test_a_directory_that_looks_like_a_step_is_named_so_that_it_can_be_read(tmp_path: Path) -> None:
    place = tmp_path / "exp@7"
    store = LocalStore(place)
    save(store, new_generation(store), 1)
    error = error_of(["ls", place], 10)
    assert error["hint"] == f"did you mean {place}/?"
    assert CliRunner().invoke(main, ["ls", f"{place}/"]).exit_code == 0
    refused = error_of(["restore", f"{place}/", tmp_path / "out@7"], 2)
    assert f"{tmp_path / 'out@7'}/" in refused["hint"]
    assert CliRunner().invoke(main, ["restore", f"{place}/", f"{tmp_path / 'out@7'}/"]).exit_code == 0
    assert CliRunner().invoke(main, ["ls", f"{tmp_path / 'out@7'}/"]).exit_code == 0


def test_an_export_that_cannot_be_written_ends_with_one_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    save(store, new_generation(store), 1)
    file = tmp_path / "file"
    file.write_bytes(b"")
    command = ["restore", str(tmp_path / "run"), str(file / "below"), "--format", "torch"]
    error = error_of(command, 13)
    assert error["kind"] == "io"
    assert str(file) in error["message"]
    lines = CliRunner().invoke(main, command).stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert not [line for line in lines if "Traceback" in line]
