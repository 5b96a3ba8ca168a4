"""Real failures of four gloo ranks, recorded: each is explained as it was when it happened, by what was kept of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from resilient.catalog.evidence import explain_generation, write_evidence
from resilient.catalog.line import read_line
from resilient.format.evidence import Evidence
from resilient.policy.failures.actions import Budgets
from resilient.policy.failures.rules import RULES
from resilient.store.memory import MemoryStore
from tests.catalog.runs import new_generation
from tests.policy.failures.corpus_cases import FOLDER

KINDS = {
    "exception": "user-error",
    "sigkill": "unknown",
    "sigsegv": "unknown",
    "exit": "user-error",
    "desync": "user-error",
    "worker": "unknown",
}

RECORDED: list[dict[str, Any]] = json.loads((FOLDER / "injections.json").read_text())


@pytest.mark.parametrize("told", RECORDED, ids=lambda told: f"{told['kind']}, {told['survivors']} survivors")
def test_the_rank_and_the_class_are_right(told: dict[str, Any]) -> None:
    store = MemoryStore()
    claim = new_generation(store)
    for record in told["records"]:
        evidence = msgspec.convert(record, Evidence)
        write_evidence(store, msgspec.structs.replace(evidence, generation=claim.generation, nonce=claim.nonce))
    found = explain_generation(store, claim.generation, read_line(store), rules=RULES, budgets=Budgets())
    assert found is not None
    assert (found.verdict.rank, str(found.verdict.failure)) == (told["bad"], KINDS[told["kind"]])


def test_all_ways_to_fail_are_recorded() -> None:
    assert {(told["kind"], told["survivors"]) for told in RECORDED} == {
        (kind, survivors) for kind in KINDS for survivors in ("fast", "slow")
    }
