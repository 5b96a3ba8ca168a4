"""``resilient why``: what people and programs are told of a failure, from the store alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.catalog.evidence import write_evidence
from resilient.catalog.generations import claim_generation
from resilient.format.documents import Claim
from resilient.store.local import LocalStore
from tests.catalog.runs import new_generation
from tests.catalog.test_evidence import CLOSED, record
from tests.cli.calling import call, called
from tests.cli.test_process import start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two lives that failed, by another rank each, and one that was killed as a whole."""
    store = LocalStore(tmp_path / "run")
    first, second = new_generation(store), new_generation(store)
    write_evidence(store, record(first, 0, "ValueError: sample 17", section="evaluation"))
    write_evidence(store, record(first, 1, CLOSED, 1.1))
    write_evidence(store, record(second, 1, "process ended by SIGKILL", seen_by=0, frames=(), step=None))
    write_evidence(store, record(second, 0, CLOSED, 1.1))
    return tmp_path / "run"


def test_the_newest_failure_is_explained_with_its_proof(run: Path) -> None:
    text = call("why", run).stdout
    assert text.startswith(
        f"generation 2 of {run}, 1 rank\n  failed by  unknown: no rule knows it (the rank is certain)"
    )
    for part in (
        "rank 1, on a, after step 5",
        "proof      rank 1: process ended by SIGKILL",
        f"then       rank 0: {CLOSED}",
    ):
        assert part in text
    assert "do         start it again on the same nodes" in text


def test_an_older_one_too_and_the_section_it_came_out_of(run: Path) -> None:
    text = call("why", run, "--generation", 1).stdout
    assert "failed by  user-error: error of the program (certain)" in text
    assert "rank 0, on a, after step 5, in section 'evaluation'" in text


def test_programs_get_all_of_it(run: Path) -> None:
    told = called("why", run)
    assert (told["generation"], told["failure"], told["rank"], told["node"]) == (2, "unknown", 1, "a")
    assert (told["confidence"], told["action"], told["exclude"]) == ("certain", "restart", None)
    assert [(each["rank"], each["seen_by"]) for each in told["records"]] == [(0, None), (1, 0)]
    assert told["records"][0]["frames"] == ["train.py:30 main (user)"]


def test_a_users_rules_count(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nclass = "device-hardware"\npatterns = ["sample \\\\d+"]')
    assert called("why", run, "--generation", 1, "--rules", rules)["failure"] == "device-hardware"
    monkeypatch.setenv("RESILIENT_RULES", str(rules))
    assert called("why", run, "--generation", 1)["failure"] == "device-hardware"
    rules.write_text("nothing")
    assert called("why", run, code=2)["error"]["kind"] == "invalid-setting"


def silent(run: Path) -> Claim:
    """Start a life with a sign of life that nobody ever gives, as one that was killed at once."""
    return claim_generation(LocalStore(run), world_size=2, launch="c" * 32, heartbeat=True)


def test_a_life_that_left_no_word_is_told_of_if_it_is_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.cli import why

    claim = silent(run)
    assert called("why", run)["generation"] == 2, "its process is this one, which lives"
    monkeypatch.setattr(why, "claimant_lives", lambda *_: False)
    told = called("why", run)
    assert (told["generation"], told["failure"], told["rank"]) == (claim.generation, "unknown", None)
    assert told["records"] == []


def test_where_nothing_failed_nothing_is_found(tmp_path: Path) -> None:
    new_generation(LocalStore(tmp_path / "run"))
    error = called("why", tmp_path / "run", code=10)["error"]
    assert error["kind"] == "no-such-object"
    called("why", tmp_path / "run", "--generation", 9, code=10)
    called("why", tmp_path / "absent", code=10)
    called("why", f"{tmp_path / 'run'}@1", code=2)


def test_its_help_teaches_what_the_confidences_mean() -> None:
    text = call("why", "--help").stdout
    for word in ("certain", "likely", "possible", "Example:"):
        assert word in text


def test_it_needs_no_torch(run: Path) -> None:
    done = start("why", run, flags=("-X", "importtime"))
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert not {name for name in imported if name.partition(".")[0] in {"torch", "fsspec", "s3fs", "botocore", "rich"}}
