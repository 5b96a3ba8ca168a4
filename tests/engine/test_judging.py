"""What a restart does after failures: which checkpoint it takes, what it says, and when it does not try again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.marks import FAILED, GOOD, RUN, USER, is_failed, read_mark, write_mark
from resilient.catalog.outcomes import read_history, write_outcome
from resilient.catalog.prune import prune
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Settings
from resilient.engine.api import load
from resilient.engine.judging import judge_failures
from resilient.engine.peers import Peers
from resilient.engine.restore import restore
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saver import Saver
from resilient.errors import CorruptError, ErrorKind, UsageError
from resilient.events import Bus, Demoted, Event, FellBack, Refused, Reinstated
from resilient.format.documents import Claim, Outcome
from resilient.format.layout import Attempt
from resilient.policy.demotion import CODE, NUMERIC
from resilient.state.capture import capture
from resilient.store.memory import MemoryStore


class Story:
    """A run of one rank, told life by life; what a restart does is done by the real code."""

    def __init__(self, **settings: Any) -> None:
        self.store = MemoryStore()
        self.settings = Settings(**settings)
        self.events: list[Event] = []
        open_run(self.store, create=True, clock=SYSTEM_CLOCK)

    def start(self, launch: str = "one") -> tuple[Claim, Attempt | None]:
        """Begin a life as `Run.track` does; return its claim, and what it has restored."""
        self.events = []
        bus = Bus()
        bus.subscribe(self.events.append)
        claim = claim_generation(self.store, world_size=1, launch=launch, heartbeat=False)
        judge_failures(self.store, claim, self.settings, bus=bus, clock=SYSTEM_CLOCK)
        found = restore(self.store, {"s": {"w": torch.zeros(1)}}, Peers.current(), resume="auto", bus=bus)
        commit = None if found is None else found.commit
        write_base(self.store, claim, commit)
        return claim, None if commit is None else commit.attempt

    def save(self, claim: Claim, *steps: int) -> None:
        saver = Saver(self.store, claim, Peers.current(), SaveSettings(), run_id="0" * 16, bus=Bus())
        for step in steps:
            state = capture({"s": {"w": torch.full((1,), float(step))}}, rank=0, world_size=1)
            saver.save(step, state, reason="test").wait(30)
        saver.close(10)

    def fail(
        self, claim: Claim, start: Attempt | None, step: int, *, error: str = "FloatingPointError", cause: str = NUMERIC
    ) -> None:
        outcome = Outcome(
            generation=claim.generation,
            nonce=claim.nonce,
            launch=claim.launch,
            rank=0,
            error=error,
            message="the loss is nan",
            cause=cause,
            program="p",
            step=step,
            created="2026-01-01T00:00:00Z",
            restored_step=None if start is None else start.step,
            restored_generation=None if start is None else start.generation,
            restored_nonce=None if start is None else start.nonce,
        )
        assert write_outcome(self.store, outcome)

    def live(self, after: int = 3, launch: str = "one", **how: Any) -> Attempt | None:
        """Live until a failure so many steps after the restore; return what was restored."""
        claim, start = self.start(launch)
        self.fail(claim, start, (0 if start is None else start.step) + after, **how)
        return start

    def told(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kinds)]

    def steps(self) -> list[int]:
        return [commit.step for commit in read_line(self.store).commits]


@pytest.fixture
def story() -> Story:
    """Tell of a run with the steps 10, 20 and 30."""
    story = Story()
    claim, _ = story.start()
    story.save(claim, 10, 20, 30)
    return story


def step_of(attempt: Attempt | None) -> int | None:
    return None if attempt is None else attempt.step


@pytest.mark.field_report("BR-232")
def test_a_checkpoint_that_leads_to_failure_twice_is_marked_and_the_next_older_one_is_taken(story: Story) -> None:
    bad = story.live()
    assert (step_of(bad), step_of(story.live())) == (30, 30)
    assert bad is not None
    _, start = story.start()
    assert step_of(start) == 20
    (demoted,) = story.told(Demoted)
    assert isinstance(demoted, Demoted)
    assert (demoted.step, "FloatingPointError: the loss is nan" in demoted.why) == (30, True)
    assert [event.why for event in story.told(FellBack) if isinstance(event, FellBack)] == [
        f"marked failed by the run: {demoted.why}"
    ]
    assert read_mark(story.store, bad, FAILED, RUN) is not None


def test_failures_that_differ_or_come_late_or_whose_program_was_changed_demote_nothing(story: Story) -> None:
    story.live()
    story.live(error="KeyError", cause=CODE)
    story.live(after=200)
    assert step_of(story.start()[1]) == 30
    assert not story.told(Demoted)


def test_a_life_that_was_killed_is_no_evidence(story: Story) -> None:
    story.live()
    story.start()  # and killed: it leaves no word
    assert step_of(story.live()) == 30
    assert step_of(story.start()[1]) == 30


def test_if_the_older_one_fails_alike_at_the_same_step_the_verdict_is_not_the_checkpoint(story: Story) -> None:
    bad = story.live()
    story.live()
    assert bad is not None
    claim, older = story.start()
    assert step_of(older) == 20
    story.save(claim, 25)
    line = read_line(story.store)
    assert [commit.step for commit in line.commits] == [25, 20, 10]
    for _ in range(2):  # what is deleted goes in two passes
        prune(story.store, line, frozenset({25}), clock=SYSTEM_CLOCK)
    story.fail(claim, older, 33)

    for _ in range(2):  # a restart by torchrun meets the same verdict, at once
        with pytest.raises(UsageError, match=r"it is not the checkpoint") as caught:
            story.start()
        assert caught.value.kind is ErrorKind.CRASH_LOOP
        assert "step 20 and from step 30" in str(caught.value)
        assert len(story.told(Refused)) == 1
    assert is_failed(story.store, bad) is None
    assert step_of(story.start(launch="two")[1]) == 30, "a new launch tries again, with what was demoted"


def test_the_verdict_names_what_it_reinstates(story: Story) -> None:
    story.live()
    story.live()
    story.live(after=13)  # from step 20, at step 33 again
    with pytest.raises(UsageError):
        story.start()
    assert [event.step for event in story.told(Reinstated) if isinstance(event, Reinstated)] == [30]


def test_the_budget_of_demotions_ends_loudly() -> None:
    story = Story(max_demotions=1)
    claim, _ = story.start()
    story.save(claim, 10, 20, 30)
    assert [step_of(story.live()) for _ in range(4)] == [30, 30, 20, 20]
    with pytest.raises(UsageError, match="1 newer checkpoints are marked failed already") as caught:
        story.start()
    assert caught.value.kind is ErrorKind.CRASH_LOOP
    assert step_of(story.start(launch="two")[1]) == 20, "nothing else was marked"


@pytest.mark.field_report("BR-190")
def test_the_same_failure_at_the_same_step_stops_the_loop_also_without_any_checkpoint() -> None:
    story = Story()
    for _ in range(3):
        assert story.live(after=5, error="ImportError", cause=CODE) is None
    with pytest.raises(UsageError, match=r"3 lives have failed in the same way at step 5, all from a fresh start"):
        story.start()


def test_what_a_person_has_called_good_is_not_demoted(story: Story) -> None:
    bad = story.live()
    assert bad is not None
    write_mark(story.store, bad, GOOD, by=USER, why="looked", clock=SYSTEM_CLOCK)
    story.live()
    assert step_of(story.live()) == 30
    with pytest.raises(UsageError, match="all from step 30"):
        story.start()


def test_a_torn_outcome_counts_as_none(story: Story) -> None:
    story.live()
    story.live()
    story.store.put("generations/00000003.end.json", [b'{"kind": "outcome"'])
    assert read_history(story.store, before=4).lives[0].failure is None
    assert step_of(story.start()[1]) == 30


def test_looking_back_after_a_life_that_did_not_fail_costs_two_reads(story: Story) -> None:
    asked: list[str] = []

    class Counting(MemoryStore):
        def get(self, key: str) -> bytes:
            asked.append(key)
            return story.store.get(key)

        def list(self, prefix: str) -> Any:
            raise AssertionError("nothing is decided from a listing")

    claim = claim_generation(story.store, world_size=1, launch="one", heartbeat=False)
    judge_failures(Counting(), claim, Settings(), bus=Bus(), clock=SYSTEM_CLOCK)
    assert asked == ["generations/00000001.end.json", "generations/00000001.base.json"]


# --- marked by a person ----------------------------------------------------------------------------------------------


def mark(story: Story, *steps: int) -> None:
    for commit in read_line(story.store).commits:
        if commit.step in steps:
            write_mark(story.store, commit.attempt, FAILED, by=USER, why="loss spikes", clock=SYSTEM_CLOCK)


def test_one_that_is_marked_failed_is_passed_over_and_told_who_marked_it_and_why(story: Story) -> None:
    mark(story, 30)
    assert step_of(story.start()[1]) == 20
    (fell_back,) = story.told(FellBack)
    assert isinstance(fell_back, FellBack)
    assert (fell_back.step, fell_back.why) == (30, "marked failed by the user: loss spikes")


def test_if_all_are_marked_failed_nothing_is_usable_and_the_hint_says_how_to_undo_it(story: Story) -> None:
    mark(story, 10, 20, 30)
    for start in (story.start, lambda: load(story.store, {"s": {"w": torch.zeros(1)}})):
        with pytest.raises(CorruptError, match="step 30: marked failed by the user: loss spikes") as caught:
            start()
        assert caught.value.kind is ErrorKind.NOTHING_USABLE
        assert "resilient mark good" in str(caught.value.hint)


def test_an_explicit_step_is_loaded_all_the_same_with_a_warning(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    mark(story, 30)
    into = {"s": {"w": torch.zeros(1)}}
    with caplog.at_level("INFO", "resilient"):
        assert load(story.store, into, step=30).step == 30
        assert "step 30 is marked failed by the user: loss spikes; it is loaded because it was asked for" in caplog.text
        assert load(story.store, into).step == 20
        assert "step 30 is not usable, taking an older one: marked failed by the user: loss spikes" in caplog.text


def test_a_mark_that_no_listing_shows_counts(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(story, 30)
    stale = read_line(story.store)
    monkeypatch.setattr(
        "resilient.engine.restore.read_line", lambda _: dataclasses.replace(stale, marks={}, commits=stale.commits)
    )
    assert step_of(story.start()[1]) == 20
