"""What ranks have written down, read back, and removed when it is old."""

from __future__ import annotations

from resilient.catalog.evidence import read_evidence
from resilient.catalog.inventory import RUN, take_inventory
from resilient.catalog.journals import read_journals, remove_old_records
from resilient.catalog.line import read_line
from resilient.events import Event, Notice, StepsTaken
from resilient.format import layout
from resilient.format.journal import name_of
from tests.report.histories import History, nonce


def told(count: int) -> list[tuple[float, Event]]:
    taken = [(float(n), StepsTaken(step=n, steps=1, turn_s=1.0, data_s=0.0, save_s=0.0)) for n in range(count)]
    return [*taken, (99.0, Notice(message="newest"))]


def test_all_ranks_are_read_and_of_the_others_what_is_wanted() -> None:
    history = History()
    number = history.claim(0.0, ranks=40)
    for rank in range(40):
        history.journal(number, 0.0, told(5), rank=rank, ranks=40)
    found = read_journals(history.store, number, nonce(number), of_others={name_of(StepsTaken)})
    assert list(found) == list(range(40))
    assert [len(journal.records) for journal in found.values()] == [6] + [5] * 39
    assert len({journal.last_s for journal in found.values()}) == 1


def test_a_segment_in_the_middle_that_is_gone_is_counted() -> None:
    history = History()
    number = history.claim(0.0)
    history.journal(number, 0.0, told(2))
    first = layout.journal(number, nonce(number), 0, "events", 0)
    history.store.put(layout.journal(number, nonce(number), 0, "events", 3), [history.store.get(first)])
    (journal,) = read_journals(history.store, number, nonce(number)).values()
    assert journal.absent == 2


def test_records_of_old_generations_go_and_claims_stay() -> None:
    history = History()
    for _ in range(6):
        number = history.claim(0.0)
        history.journal(number, 0.0, told(1))
        history.failed(number, 1.0)
    assert remove_old_records(history.store, kept=2) == 8
    assert [bool(read_journals(history.store, n, nonce(n))) for n in range(1, 7)] == [False] * 4 + [True] * 2
    assert [bool(read_evidence(history.store, n)) for n in range(1, 7)] == [False] * 4 + [True] * 2
    assert remove_old_records(history.store, kept=2) == 0
    assert sum(layout.parse_claim(key) is not None for key in history.store.list(layout.GENERATIONS)) == 6


def test_journals_are_known_as_part_of_the_run() -> None:
    history = History()
    number = history.claim(0.0)
    history.journal(number, 0.0, told(1))
    history.store.put(f"{layout.JOURNALS}notes.txt", [b"mine"])
    inventory = take_inventory(history.store, read_line(history.store))
    assert inventory.unknown == (f"{layout.JOURNALS}notes.txt",)
    assert inventory.amounts[RUN].objects == 4
