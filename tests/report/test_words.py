"""What an account says in words: the state of the run, whose fault it was, what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.report import words
from resilient.report.model import End, Incident, Ledger, Part, Promise, Stake
from tests.report import ledgers


def with_parts(**seconds: float) -> Ledger:
    parts = {Part[name.upper()]: value for name, value in seconds.items()}
    return replace(ledgers.calm(), parts=parts, as_of_s=ledgers.BEGAN_S + sum(parts.values()))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (End.RUNNING, "calm is training: step 2,360, in generation 1, on 2 ranks (1 host)."),
        (End.DONE, "calm has ended as planned: step 2,360, after 1 generation."),
        (End.FAILED, "calm has failed and does not run: step 2,360, after 1 generation."),
    ],
)
def test_the_state_of_a_run_is_one_sentence(end: End, said: str) -> None:
    assert words.state(ledgers.calm(end)) == said


def test_a_run_that_has_not_begun_says_so() -> None:
    assert words.state(ledgers.empty()) == "new has not trained yet: no generation has begun."
    assert words.advice(ledgers.empty()) == ("Nothing yet: there is no time to account for.",)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("lost", "Save more often"),
        ("save", "Save less often"),
        ("restore", "Restore from nearer"),
        ("start", "Start faster"),
        ("detection", "Notice failures sooner"),
        ("reformation", "Meet again sooner"),
        ("idle", "started again at once"),
    ],
)
def test_the_largest_cause_is_what_is_advised_about_first(name: str, word: str) -> None:
    others = {each.name.lower(): 20.0 for each in words._ADVICE if each.name.lower() != name}
    first = words.advice(with_parts(compute=800.0, **others, **{name: 100.0}))[0]
    assert word in first
    assert f"{Part[name.upper()]} took 1 min 40 s, 9.8 % of the time" in first


def test_what_costs_next_to_nothing_is_not_worth_an_advice() -> None:
    assert words.advice(with_parts(compute=1000.0, start=4.0)) == (
        "Nothing: 99.6 % of the time went into steps that were kept.",
    )


def test_a_node_at_which_failures_begin_again_is_named_but_not_for_errors_of_the_program() -> None:
    ledger = ledgers.rich()
    assert "Have node node-b examined (`resilient check`): 3 failures began there." in words.advice(ledger)
    own = replace(ledger, incidents=tuple(replace(one, failure="user-error") for one in ledger.incidents))
    assert not [one for one in words.advice(own) if "examined" in one]


def test_waiting_for_data_or_for_others_is_told() -> None:
    told = " ".join(words.advice(with_parts(compute=400.0, exchange=400.0, data=200.0)))
    assert "steps wait for data 20.0 % of their time" in told
    assert "exchange takes 40.0 % of the steps" in told


def test_origins_and_stakes() -> None:
    assert words.origins((("memory", 3 << 30), ("s3://b/r", 1 << 30))) == (
        "memory of the node (75.0 % of 3.0 GiB) and s3://b/r (25.0 % of 1.0 GiB)"
    )
    assert words.stake(Stake(what="a node", step=None, source="", lost_s=None)) == "everything: nothing is saved yet"


def test_the_unknown_is_said_to_be_unknown() -> None:
    one = Incident(
        at_s=0, generation=1, failure="unknown", confidence="", rank=None, node=None, why="", proof=(), action="",
        because="", last_step=3, resumed_step=None, lost_steps=3, parts={},
    )  # fmt: skip
    assert words.fault(one) == "not known"
    assert words.confidence(replace(one, confidence="certain")) == "the rank is certain"
    assert words.where(one) == "no single rank"
    assert words.failure(one) == "no rule knows it (unknown)"
    assert words.came_back(one) == "it has not come back from it, or began afresh"
    assert words.fault(replace(one, failure="of a later version")) != ""


def test_a_promise_is_said_to_be_kept_or_missed() -> None:
    promise = Promise(promised=0.9, delivered=0.95, largest=Part.LOST, message="")
    assert (
        words.promise(replace(ledgers.calm(), promise=promise)) == "promise kept: 95.0 % delivered of 90.0 % promised"
    )
    missed = words.promise(replace(ledgers.calm(), promise=replace(promise, delivered=0.8)))
    assert missed.endswith("; most of the rest went into lost work")
