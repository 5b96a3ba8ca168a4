"""What the records of a generation come to, read back from the store, and what is advised after several."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.catalog.evidence import (
    Explained,
    explain_generation,
    load_rules,
    read_evidence,
    write_evidence,
    write_explanation,
)
from resilient.catalog.line import read_line
from resilient.catalog.outcomes import write_outcome
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, UsageError
from resilient.format import layout
from resilient.format.documents import Claim, Outcome
from resilient.format.evidence import Evidence, Frame
from resilient.policy.failures.actions import Budgets
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from tests.catalog.runs import new_generation, save

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:6284"


def record(claim: Claim, rank: int, line: str, at_s: float = 1.0, **more: object) -> Evidence:
    base: dict[str, object] = {
        "generation": claim.generation,
        "nonce": claim.nonce,
        "rank": rank,
        "world_size": claim.world_size,
        "first_rank": 0,
        "local_world_size": claim.world_size,
        "host": "a",
        "pid": 100 + rank,
        "clock": "boot",
        "monotonic_s": at_s,
        "wall_s": 1e9 + at_s,
        "created": "",
        "lines": (line,),
        "frames": (Frame(owner="user", file="train.py", line=30, function="main"),),
        "step": 5,
    }
    return Evidence(**(base | more))  # type: ignore[arg-type]  # a table of fields


def explained(store: Store, claim: Claim, *, attempts: int = 9) -> Explained | None:
    budgets = Budgets(attempts=attempts)
    return explain_generation(store, claim.generation, read_line(store), rules=load_rules(None), budgets=budgets)


def failed(store: Store, claim: Claim, *, attempts: int = 9) -> Explained:
    found = explained(store, claim, attempts=attempts)
    assert found is not None
    return found


def test_all_ranks_records_make_one_verdict_and_a_torn_one_is_passed_over() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    write_evidence(store, record(claim, 0, CLOSED, 1.1))
    write_evidence(store, record(claim, 1, "process ended by SIGKILL", 1.0, seen_by=0, frames=(), step=None))
    store.put(layout.evidence(claim.generation, 7), [b"{"])
    found = failed(store, claim)
    assert (found.verdict.rank, found.verdict.node, str(found.decision.action)) == (1, "a", "restart")
    assert [each.rank for each in found.records] == [0, 1]


def test_a_record_of_another_claim_of_this_number_does_not_count() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    write_evidence(store, record(claim, 0, "KeyError: 'x'", nonce="f" * 16))
    assert read_evidence(store, claim.generation) == []
    assert explained(store, claim) is None


def test_of_several_who_saw_one_end_the_first_counts() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    write_evidence(store, record(claim, 1, "process ended by SIGKILL", seen_by=0))
    write_evidence(store, record(claim, 1, "process ended, nobody saw how", seen_by=2))
    assert [each.lines for each in read_evidence(store, claim.generation)] == [("process ended by SIGKILL",)]


@pytest.mark.parametrize("kept", [True, False], ids=["from what was concluded", "from the records"])
def test_the_same_failure_again_without_progress_is_not_tried_again(kept: bool) -> None:
    store = MemoryStore()
    for action in ("restart", "stop"):
        claim = new_generation(store)
        write_evidence(store, record(claim, 1, "ValueError: x"))
        found = failed(store, claim)
        assert found.decision.action == action
        if kept:
            write_explanation(store, found, acted=True, clock=SYSTEM_CLOCK)


def test_what_got_further_starts_to_count_anew() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        claim = new_generation(store)
        save(store, claim, step)
        write_evidence(store, record(claim, 1, "ValueError: x"))
        assert failed(store, claim).decision.action == "restart"


def outcome_of(claim: Claim, *, error: str, message: str, cause: str, rank: int = 0, step: int = 0) -> Outcome:
    return Outcome(
        generation=claim.generation,
        nonce=claim.nonce,
        launch=claim.launch,
        rank=rank,
        error=error,
        message=message,
        cause=cause,
        program="",
        step=step,
        created="",
    )


def test_a_life_that_an_older_version_told_of_is_explained_from_that() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    outcome = outcome_of(claim, error="ValueError", message="record # is broken", cause="code", rank=1, step=8)
    write_outcome(store, outcome)
    verdict = failed(store, claim).verdict
    assert (str(verdict.failure), verdict.rank, verdict.step) == ("user-error", 1, 8)


def test_a_run_that_was_refused_says_so() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    outcome = outcome_of(
        claim, error="UsageError", message="the last 3 lives have failed in the same way", cause="verdict"
    )
    write_outcome(store, outcome)
    assert (str(failed(store, claim).verdict.failure), str(failed(store, claim).decision.action)) == (
        "crash-loop",
        "stop",
    )


def test_rules_of_a_file_come_first_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nclass = "device-hardware"\npatterns = ["x is gone"]')
    assert load_rules(str(path))[0].patterns == ("x is gone",)
    for text in ("[[rule", '[[rule]]\nclass = "sunspots"\npatterns = []'):
        path.write_text(text)
        with pytest.raises(UsageError, match=str(path)) as caught:
            load_rules(str(path))
        assert caught.value.kind is ErrorKind.INVALID_SETTING
    with pytest.raises(UsageError, match="absent"):
        load_rules(str(tmp_path / "absent"))
