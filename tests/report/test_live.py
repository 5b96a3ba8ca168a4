"""What is said of a run that goes on."""

from __future__ import annotations

from dataclasses import replace

from resilient.report.live import Live, as_json, facts, line
from resilient.report.model import End, Ledger
from tests.report import ledgers


def live(ledger: Ledger, **changed: object) -> Live:
    at = Live(ledger=ledger, now_s=ledger.as_of_s + 10, alive=True, steps_per_s=2.0, total=None)
    return replace(at, **changed)  # type: ignore[arg-type]  # any field


def test_what_is_saved_and_what_is_on_its_way() -> None:
    told = dict(facts(live(ledgers.running())))
    assert told["saved"] == "saved step 2,000, 3 min 30 s ago; step 2,350 on its way for 12 s"
    assert told["step"] == "step 2,360, 2.00 steps/s"
    assert told["generation"] == "1, 2 ranks on node-a, began 20 min 10 s ago"
    assert told["last failure"] == "none"
    assert told["state"].endswith("It gives signs of life.")
    assert "on its way" not in dict(facts(live(ledgers.calm())))["saved"]


def test_the_store_may_know_of_a_newer_save_than_the_ranks_have_written_down() -> None:
    ledger = ledgers.running()
    ahead = replace(ledger, stakes=(replace(ledger.stakes[0], step=2350),))
    assert dict(facts(live(ahead)))["saved"].startswith("saved step 2,350, 12 s ago")


def test_a_failed_or_older_save_is_not_on_its_way() -> None:
    ledger = ledgers.running()
    failed = replace(ledger.saves[-1], error="no space")
    assert live(replace(ledger, saves=(*ledger.saves[:-1], failed))).in_flight is None
    older = replace(ledger.saves[-1], generation=0)
    assert live(replace(ledger, saves=(*ledger.saves[:-1], older))).in_flight is None


def test_when_it_will_be_done() -> None:
    told = dict(facts(live(ledgers.running(), total=9560)))
    assert told["done"] == "in 1 h, at 2026-12-01 13:50 UTC, if nothing fails"
    assert "cannot be told" in dict(facts(live(ledgers.running(), total=9560, steps_per_s=None)))["done"]


def test_slow_steps_are_told_by_their_length() -> None:
    assert dict(facts(live(ledgers.running(), steps_per_s=0.1)))["step"] == "step 2,360, 10 s a step"


def test_old_news_are_said_to_be_old() -> None:
    told = dict(facts(live(ledgers.running(), trouble="no answer", age_s=75.0)))
    assert told["trouble"] == "no answer (what is shown was read 1 min 15 s ago; trying again)"
    assert "trouble: no answer" in line(live(ledgers.running(), trouble="no answer"))


def test_a_run_that_has_not_begun_and_hostile_words() -> None:
    assert dict(facts(live(ledgers.empty(), alive=None, steps_per_s=None)))["saved"] == "nothing saved yet"
    said = line(live(ledgers.hostile())) + str(facts(live(ledgers.hostile())))
    assert "\x1b" not in said
    assert "\n" not in line(live(ledgers.hostile()))


def ended(how: End, *, alive: bool | None) -> Live:
    ledger = ledgers.calm()
    newest = replace(ledger.generations[-1], end=how)
    return live(replace(ledger, generations=(*ledger.generations[:-1], newest), stakes=()), alive=alive)


def test_nobody_misses_the_life_of_a_run_that_has_ended_as_it_should() -> None:
    for how in (End.DONE, End.STOPPED):
        for alive in (False, None):
            over = ended(how, alive=alive)
            assert not over.lost
            assert "sign" not in dict(facts(over))["state"] + line(over)
            assert "known" not in dict(facts(over))["state"]
    assert "has ended as planned" in line(ended(End.DONE, alive=False))
    for how in (End.RUNNING, End.FAILED, End.UNKNOWN):
        down = ended(how, alive=False)
        assert down.lost
        assert dict(facts(down))["state"].endswith("It gives no sign of life.")
        assert not ended(how, alive=None).lost


def test_a_run_that_is_complete_has_nothing_at_stake() -> None:
    assert dict(facts(ended(End.DONE, alive=False)))["at stake"] == "nothing: the run is complete"
    assert dict(facts(ended(End.STOPPED, alive=False)))["at stake"] == "not recorded"


def test_programs_get_numbers() -> None:
    told = as_json(live(ledgers.running(), total=9560))
    assert (told["step"], told["saved_step"], told["save_in_flight"], told["left_s"]) == (2360, 2000, 2350, 3600.0)
