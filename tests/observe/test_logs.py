from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from resilient import events
from resilient.observe.logs import Lines

CASES = [
    (
        events.GenerationStarted(url="u", generation=1, world_size=1, resumed_step=None),
        "fresh start in u (generation 1, 1 rank)",
    ),
    (
        events.GenerationStarted(url="u", generation=3, world_size=4, resumed_step=7),
        "resumed at step 7 from u (generation 3, 4 ranks)",
    ),
    (
        events.Restored(step=7, generation=2, saved_world_size=3, nbytes_read=3 << 20, duration_s=0.26),
        "restored step 7, saved by 3 ranks: 3.0 MiB read and verified by rank 0 in 0.3 s",
    ),
    (events.FellBack(step=7, why="bad digest"), "step 7 is not usable, taking an older one: bad digest"),
    (events.SaveCommitted(step=7, nbytes=100, duration_s=1.04), "saved step 7 (100 B, 1.0 s)"),
    (events.SaveFailed(step=7, error="disk full"), "the save of step 7 failed, training goes on: disk full"),
    (
        events.SaveFailed(step=7, error="disk full", failures=3),
        "the save of step 7 failed (3 in a row), training goes on: disk full",
    ),
    (events.SaveSkipped(step=7, why="busy"), "no save at step 7: busy"),
    (events.Demoted(step=7, why="it fails"), "step 7 is marked failed from now on: it fails"),
    (events.Reinstated(step=7, why="others do too"), "step 7 is not marked failed any more: others do too"),
    (
        events.FailureExplained(
            generation=3,
            failure="user-error",
            confidence="certain",
            why="first",
            at_rank=2,
            node="a",
            proof=("rank 2: KeyError: 'x'",),
            action="stop",
            because="twice alike",
            acts=False,
        ),
        "generation 3 failed by user-error on rank 2 (a), certain: rank 2: KeyError: 'x'; advice: stop (twice alike)",
    ),
    (events.Refused(why="thrice the same"), "no further try: thrice the same"),
    (
        events.StateUnchanged(step=7, since=5),
        (
            "training changes nothing: every trained parameter at step 7 is what it was at step 5, although optimizers "
            "have stepped (is the learning rate 0? does the optimizer have the parameters of this model?)"
        ),
    ),
    (events.Notice(message="done"), "done"),
]


@pytest.mark.parametrize(("event", "line"), CASES, ids=[line[:32] for _, line in CASES])
def test_each_event_is_one_line(event: events.Event, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    Lines()(event)
    assert caplog.messages == [line]


def test_other_ranks_report_only_what_is_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    lines = Lines()
    lines(events.Notice(rank=1, message="done"))
    lines(events.SaveFailed(rank=1, step=7, error="disk full"))
    assert caplog.messages == ["rank 1: the save of step 7 failed, training goes on: disk full"]


def test_saves_left_out_for_one_reason_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    lines = Lines()
    for step, why in [(2, "busy with 1"), (3, "busy with 1"), (4, "busy with 1"), (6, "busy with 5")]:
        lines(events.SaveSkipped(step=step, why=why))
    assert caplog.messages == ["no save at step 2: busy with 1", "no save at step 6: busy with 5"]


@pytest.mark.parametrize("configured", [True, False])
def test_standard_error_is_used_only_where_no_logging_is_configured(configured: bool) -> None:
    program = f"""
        import logging
        from resilient.events import Bus, Notice
        from resilient.observe.logs import show_logs
        bus = Bus()
        show_logs(bus)
        if {configured}:  # also when that comes later
            logging.basicConfig(level=logging.INFO, format="own: %(message)s")
        bus.emit(Notice(message="hello"))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stderr == ("own: hello\n" if configured else "resilient: hello\n")


def test_an_event_with_many_samples_is_still_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "resilient")
    values = (("cpu", tuple(0.5 for _ in range(5000))),)
    Lines()(events.MachineSampled(host="a", began_s=0.0, period_s=0.1, values=values))
    (line,) = caplog.messages
    assert line.startswith("MachineSampled(")
    assert len(line) <= 500
