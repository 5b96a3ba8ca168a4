"""What a trainer writes in a microsecond, a watcher reads whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.detect.page import OTHER, Owner, Page, PageView
from tests.catalog.runs import HandClock
from tests.ranks import fork_context

OWNER = Owner(pid=1234, rank=3, signal=60, thread=77)


def test_where_a_rank_is_and_how_long_its_sections_took(tmp_path: Path) -> None:
    clock = HandClock()
    page = Page(tmp_path / "page", OWNER, clock=clock)
    view = PageView(tmp_path / "page")
    assert view.owner == OWNER
    step, save, data = page.section("step"), page.section("save"), page.section("data")
    page.turn_to(step, 4)
    began_s = clock.monotonic()
    clock.sleep(2.0)
    page.enter(save)
    assert (view.glance().section, view.glance().step) == ("save", 4)
    clock.sleep(5.0)
    assert page.leave() == 5.0
    assert view.glance().section == "step"
    assert view.glance().started_s == began_s + 5.0, "a save within a step is no part of its time"
    clock.sleep(1.0)
    assert page.turn_to(data, 5) == 3.0
    glance, seen = view.glance(), view.seen()
    assert (glance.section, glance.step, glance.seen.count) == ("data", 5, 0)
    assert (seen["step"].count, seen["step"].longest_s) == (1, 3.0)
    assert (seen["save"].count, seen["save"].longest_s) == (1, 5.0)
    clock.sleep(1.0)
    page.beat()
    assert view.glance().beat_s == clock.monotonic()
    assert not view.closed
    page.close()
    assert view.closed


def test_more_names_than_there_is_room_for_share_one(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", OWNER)
    numbers = [page.section(f"evaluation {number}") for number in range(500)]
    page.turn_to(numbers[-1], 0)
    assert PageView(tmp_path / "page").glance().section == OTHER
    page.turn_to(numbers[0], 0)
    assert PageView(tmp_path / "page").glance().section == "evaluation 0"


def test_what_is_no_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="no page of this version"):
        PageView(tmp_path / "page")


def test_where_there_is_no_room_no_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Page(tmp_path / "page", OWNER)


def keep_turning(path: str) -> None:
    page = Page(Path(path), OWNER)
    sections = [page.section(f"section {number}") for number in range(7)]
    step = 0
    while True:
        step += 1
        page.turn_to(sections[step % 7], step)


def test_a_glance_at_a_page_that_is_being_written_is_never_half_of_one(tmp_path: Path) -> None:
    process = fork_context().Process(target=keep_turning, args=(str(tmp_path / "page"),), daemon=True)
    process.start()
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "page").exists() or not (tmp_path / "page").stat().st_size:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.1)
        view = PageView(tmp_path / "page")
        steps: set[int] = set()
        while len(steps) < 500:  # how often the two run at the same time is for the machine to say
            assert time.monotonic() < end, f"only {len(steps)} glances were at something new"
            for _ in range(1000):
                glance = view.glance()
                assert glance.section in (f"section {glance.step % 7}", OTHER)
                steps.add(glance.step)
    finally:
        process.kill()
        process.join()


def cpu_s_of(call: Callable[[], object], times: int = 20_000) -> float:
    """Return what one call takes of the processor, in the best of several rounds: others use this machine as well."""
    rounds = []
    for _ in range(7):
        began_s = time.thread_time()
        for _ in range(times):
            call()
        rounds.append((time.thread_time() - began_s) / times)
    return min(rounds)


def test_a_mark_takes_less_than_two_microseconds(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", OWNER)
    step = page.section("step")
    assert cpu_s_of(lambda: page.turn_to(step, 1)) < 2e-6
