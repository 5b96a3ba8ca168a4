"""Ranks that hang, for real: which one and in what is right, and its stacks are kept before anything is done."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import resilient
from resilient.catalog.generations import newest_claim
from resilient.catalog.hangs import read_hangs
from resilient.detect import folders
from resilient.detect.words import JOURNAL, Hung, decode_lines
from resilient.format.hangs import Hang
from resilient.store.local import LocalStore
from tests.figures import Figures
from tests.lives import Life
from tests.run.hanging import HANG_AT, train, train_unevenly

RANKS = 3
CASES = ("step", "exchange", "save", "restore", "eval", "data", "loader")
SECTION = {"loader": "data"}
TOGETHER = 4


def words_of(place: Path, generation: int) -> list[Hung]:
    """Return what the watchers of a generation have said of hangs."""
    claim = newest_claim(LocalStore(place))
    if claim is None or claim.generation < generation:
        return []
    folder = folders.base() / f"life-{generation:08d}-{claim.nonce}"
    said = [entry.word for path in folder.glob(f"{JOURNAL}*") for entry in decode_lines(path.read_bytes())]
    return [word for word in said if isinstance(word, Hung)]


def hang(folder: Path, where: str, victim: int) -> tuple[Hung, list[Hang], str]:
    """Let one rank hang; return what was said first, where all ranks stood, and what was printed."""
    place, generation = folder / "run", 1
    if where == "restore":
        Life(RANKS, folder / "before", train, str(place), "nowhere", victim, 8).succeed()
        generation = 2
    life = Life(RANKS, folder / "life", train, str(place), where, victim)
    try:
        end = time.monotonic() + 100
        while not (said := [word for word in words_of(place, generation) if not word.covered]):
            assert time.monotonic() < end, f"no hang was seen\n{life.output()}"
            assert life.alive, life.output()
            time.sleep(0.2)
        return said[0], list(read_hangs(LocalStore(place), generation)), life.output()
    finally:
        life.kill()


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_the_rank_that_hangs_and_its_section_are_named(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("hangs", f"injected hangs on {RANKS} ranks: is the right rank named, and the right section?")
    wanted = [(number, CASES[number % len(CASES)], random.Random(number).randrange(RANKS)) for number in range(42)]
    todo = wanted[len(kept) : count(len(CASES), 42)]

    def one(case: tuple[int, str, int]) -> tuple[int, str, int, Hung, list[Hang], str]:
        number, where, victim = case
        return (*case, *hang(tmp_path / f"{number}-{where}", where, victim))

    with ThreadPoolExecutor(TOGETHER) as pool:  # what hangs needs no processor
        for number, where, victim, hung, hangs, printed in pool.map(one, todo):
            section = SECTION.get(where, where)
            right = (hung.cause, hung.cause_section) == (victim, section)
            kept.add(
                number=number,
                where=where,
                victim=victim,
                named=-1 if hung.cause is None else hung.cause,
                section=hung.cause_section,
                right=right,
                age_s=hung.age_s,
            )
            assert {each.rank for each in hangs} == set(range(RANKS)), printed
            assert all("train" in each.stacks for each in hangs), "the stacks of all local ranks"
            if where == "loader":
                (worker,) = next(each for each in hangs if each.rank == victim).workers
                assert "__getitem__" in worker.stacks, "those of loader workers, too"
            if right:
                assert f"rank {victim} hangs in {section}" in printed
    rounds = list(kept)
    wrong = [each for each in rounds if not each["right"]]
    assert len(wrong) <= len(rounds) * 2 // 40, wrong


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_healthy_loop_gives_no_alarm(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    steps = count(300, 10_000)
    life = Life(1, tmp_path / "life", train_with_slow_steps, str(tmp_path / "run"), steps)
    life.succeed(1100)
    assert "hangs" not in life.output()
    assert f"done: {steps} steps" in life.output()


def train_with_slow_steps(place: str, steps: int) -> None:
    import torch

    @resilient.train(place, every=20, watch_every_s=0.1, hang_floor_s=0.25)
    def main(run: resilient.Run) -> None:
        state = {"weight": torch.zeros(1000)}
        run.track(state=state)
        for _ in run.steps(range(steps), total=steps):
            time.sleep(0.2 if run.step % 100 == 99 else 0.01)
            state["weight"] += 1

    main()


@pytest.mark.timeout(600)
def test_on_hang_restart_lets_torchrun_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, os, time, resilient, torch\n"
        "how = {'on_hang': 'restart', 'watch_every_s': 0.25, 'hang_floor_s': 1, 'hang_after_s': 4}\n"
        "@resilient.train(sys.argv[1], every=2, **how)\n"
        "def main(run):\n"
        "    state = {'weight': torch.zeros(10)}\n"
        "    run.track(state=state)\n"
        "    print('START', run.step, flush=True)\n"
        "    for _ in run.steps(range(20), total=20):\n"
        "        if run.step == 8:\n"
        "            run.save().wait(60)\n"
        "        if run.step == 10 and run.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "            time.sleep(600)\n"
        "        torch.distributed.barrier()\n"
        "        state['weight'] += 1\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(program), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    starts = sorted(int(step) for step in re.findall(r"START (\d+)", ended.stdout))
    assert starts[:2] == [0, 0]
    assert starts[2] == starts[3] >= 8, "it went on from a checkpoint"
    assert "rank 1 hangs in step" in ended.stderr
    hangs = read_hangs(LocalStore(tmp_path / "run"), 1)
    assert [each.rank for each in hangs] == [0, 1]
    assert [each.step for each in hangs] == [10, 10]
    said = subprocess.run(
        [str(Path(sys.executable).with_name("resilient")), "why", str(tmp_path / "run"), "--generation", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(said.stdout)
    assert (found["failure"], found["rank"]) == ("hang", 1), "and not the one whose collective timed out"
    assert "hang: in step after step 10" in found["proof"][0]


def uneven(folder: Path, victim: int, factor: float, reports: int) -> tuple[int, list[list[object]]]:
    """Train on some ranks; return how many reports were scored, and which ranks were found slow."""
    note = folder / "note"
    life = Life(RANKS, folder / "life", train_unevenly, str(folder / "run"), victim, factor, reports, str(note))
    life.succeed(600)
    found = json.loads(note.read_text())
    return found["reports"], found["found"]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_rank_that_is_slowed_1_5_times_is_named_with_what_it_is_slow_in(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("stragglers", f"real loops on {RANKS} ranks, one slowed 1.5 times: who is named?")
    for number in range(len(kept), count(1, 20)):
        victim = random.Random(number).randrange(RANKS)
        reports, found = uneven(tmp_path / str(number), victim, 1.5, 5)
        assert [(rank, section) for rank, section, _, _ in found] == [(victim, "compute")], found
        kept.add(victim=victim, reports=reports)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_no_healthy_rank_is_called_slow(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    wanted = count(8, 100)
    reports, found = uneven(tmp_path, -1, 1.0, wanted)
    assert reports >= wanted
    assert found == []


def test_nothing_is_left_of_a_run_that_has_ended_and_off_starts_nothing(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    def life(on_hang: str) -> None:
        @resilient.train(tmp_path / on_hang, on_hang=on_hang)
        def main(run: resilient.Run) -> None:
            run.track(state={"number": 1})
            claim = newest_claim(LocalStore(tmp_path / on_hang))
            assert claim is not None
            folder = folders.base() / f"life-{claim.generation:08d}-{claim.nonce}"
            for _ in run.steps(range(3)):
                time.sleep(0.2)
            seen[on_hang] = (folder / "journal-0").exists()
            seen[f"{on_hang} after"] = folder.exists()
            folder_of[on_hang] = folder

        folder_of: dict[str, Path] = {}
        main()
        assert not folder_of[on_hang].exists()

    life("report")
    life("off")
    assert seen["report"]
    assert not seen["off"]
    assert not seen["off after"]


def test_errors_say_in_which_section_they_were(tmp_path: Path) -> None:
    @resilient.train(tmp_path, on_hang="off")
    def main(run: resilient.Run) -> None:
        run.track(state={"number": 1})
        for _ in run.steps(range(3)):
            with run.section("eval"):
                raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        main()
    assert "in section 'eval', after step 0" in raised.value.__notes__
    assert HANG_AT > 0


EVALUATES = """
import sys, time, resilient, torch
how = {'on_hang': 'restart', 'watch_every_s': 0.25, 'hang_floor_s': 1, 'hang_after_s': float(sys.argv[2])}
@resilient.train(sys.argv[1], every=50, **how)
def main(run):
    state = {'weight': torch.zeros(10)}
    run.track(state=state)
    for _ in run.steps(range(700), total=700):
        if run.step == 600 and run.rank == 0:
            with run.section('eval'):
                time.sleep(float(sys.argv[3]))
        torch.distributed.barrier()
        state['weight'] += 1
    print('DONE', flush=True)
main()
"""


def evaluates(tmp_path: Path, *, hang_after_s: float, takes_s: float) -> subprocess.CompletedProcess[str]:
    """Train on two ranks, one of which evaluates once; of its section nothing is learned, of the other's steps much."""
    program = tmp_path / "program.py"
    program.write_text(EVALUATES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    ended = subprocess.run(
        [*command, str(program), str(tmp_path / "run"), str(hang_after_s), str(takes_s)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert "rank 0 hangs in eval (all others wait for it)" in ended.stderr, "else nothing was to be decided"
    return ended


@pytest.mark.timeout(600)
def test_who_waits_for_a_rank_that_is_within_its_own_time_is_not_ended(tmp_path: Path) -> None:
    ended = evaluates(tmp_path, hang_after_s=30, takes_s=8)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("DONE") == 2
    assert read_hangs(LocalStore(tmp_path / "run"), 1) == (), "what is over explains no later end"


@pytest.mark.timeout(600)
def test_a_rank_that_others_have_reported_first_is_ended_when_its_own_time_is_over(tmp_path: Path) -> None:
    ended = evaluates(tmp_path, hang_after_s=6, takes_s=600)
    assert ended.returncode == 1
    assert "rank 0 is ended: it hangs" in ended.stderr
    hangs = read_hangs(LocalStore(tmp_path / "run"), 1)
    assert {each.rank for each in hangs} == {0, 1}, "that the other rank went on, into an error, takes nothing back"
