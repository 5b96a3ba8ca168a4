"""What a process had told before the last flush interval is in its journal, whenever it is killed."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.catalog.generations import newest_claim
from resilient.catalog.journals import read_journals
from resilient.format.journal import name_of
from resilient.store.open import open_store
from tests.crash.emitting import emit
from tests.figures import Figures
from tests.lives import Life

EVERY_S = 0.5
ALLOWED_S = 0.5
"""For the thread to get its turn, and the store to take it, on a machine that does much else."""


@pytest.mark.proof
def test_no_event_is_lost_that_is_older_than_an_interval(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    found = figures("events-lost", "Events lost to SIGKILL, up to the last flush interval")
    for number in range(len(found), count(3, 20)):
        seed = random.randrange(2**32)
        folder = tmp_path / str(number)
        place, log = folder / "run", folder / "log"
        life = Life(1, folder, emit, str(place), str(log), EVERY_S)
        until = time.monotonic() + 60
        while not (log.exists() and "generation-started" in log.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.5, 4.0))
        killed_s = time.time()
        life.kill()
        life.wait()
        told = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        store = open_store(place)
        claim = newest_claim(store)
        assert claim is not None
        kept = Counter(
            (name_of(type(record.event)), getattr(record.event, "step", None))
            for journal in read_journals(store, claim.generation, claim.nonce).values()
            for record in journal.records
        )
        due = Counter((line["event"], line["step"]) for line in told if line["at"] < killed_s - EVERY_S - ALLOWED_S)
        lost = due - kept
        print(f"seed {seed}: {len(told)} told, {due.total()} due, {kept.total()} kept, lost {dict(lost)}")
        assert not lost
        found.add(told=len(told), due=due.total(), kept=kept.total(), lost=lost.total())
