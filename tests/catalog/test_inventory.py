"""Every object of a run is told by what it is for, and what its loss would mean."""

from __future__ import annotations

from resilient.catalog.inventory import KINDS, Inventory, take_inventory
from resilient.catalog.line import read_line
from resilient.catalog.prune import prune
from resilient.catalog.verify import verify
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, attempt_of, new_generation, save
from tests.catalog.sharing import a_state, commit, save_sharing


def inventory(store: Store) -> Inventory:
    return take_inventory(store, read_line(store))


def objects(found: Inventory) -> dict[str, int]:
    return {kind: found.amounts[kind].objects for kind in KINDS if found.amounts[kind].objects}


def apart(found: Inventory) -> list[tuple[int, str, bool]]:
    return [(one.attempt.step, one.kind, one.complete) for one in found.apart]


def losses(found: Inventory) -> list[tuple[int, tuple[int, ...], int | None]]:
    return [(one.attempt.step, one.takes, one.left) for one in found.losses]


def test_every_object_is_counted_once_with_its_size() -> None:
    store = MemoryStore()
    first = new_generation(store)
    for step in (1, 2):
        save(store, first, step)
    save(store, first, 3, commit=False)
    second = new_generation(store, read_line(store).at(1))  # step 2 is off the line
    save(store, second, 4)
    store.put(attempt_of(second, 5).data(0, 0), [b"being written"])
    save(store, second, 6, commit=False)
    save(store, second, 7)
    store.put(attempt_of(second, 7).commit, [b"torn"])
    store.put("notes.txt", [b"somebody's"])
    store.put("generations/readme", [b""])
    found = inventory(store)
    a_step = 2 + 2 + 2  # receipts, manifest and COMMIT, data
    assert objects(found) == {
        "run": 1 + 2 * 3 + 1,
        "committed": 2 * a_step + 1,  # and the mark that step 1 was continued
        "unfinished": 1 + 4,
        "torn": a_step,
        "orphaned": a_step + 4,
        "unknown": 1,
    }
    keys = list(store.list(""))
    assert sum(amount.objects for amount in found.amounts.values()) == len(keys)
    assert sum(amount.nbytes for amount in found.amounts.values()) == sum(map(store.size, keys))
    assert found.unknown == ("notes.txt",)
    assert apart(found) == [
        (2, "orphaned", False),
        (3, "orphaned", False),
        (5, "unfinished", False),
        (6, "unfinished", False),
        (7, "torn", False),
    ]


def test_what_only_lacks_its_commit_is_called_complete() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    save(store, claim, 1, world_size=1)
    save(store, claim, 2, world_size=1, commit=False)
    save(store, claim, 3, world_size=1)
    store.delete(attempt_of(claim, 3).commit)
    assert apart(inventory(store)) == [(2, "unfinished", True), (3, "unfinished", True)]


def test_nothing_is_left_to_tell_of_what_is_gone_but_its_tombstone() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    for step in (1, 2):
        save(store, claim, step)
    prune(store, read_line(store), {2}, clock=HandClock())
    assert apart(inventory(store)) == [(1, "orphaned", False)]
    prune(store, read_line(store), {2}, clock=HandClock())
    found = inventory(store)
    assert apart(found) == []
    assert objects(found) == {"run": 4 + 1, "committed": 6}


def test_the_loss_of_shared_data_takes_all_that_rest_on_it() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    commit(store, save_sharing(store, claim, 1, a_state(1, frozen=5)))
    base = save_sharing(store, claim, 2, a_state(2))
    commit(store, base)
    for step in (3, 4):
        commit(store, save_sharing(store, claim, step, a_state(step), base))
    assert losses(inventory(store)) == [(4, (4,), 3), (3, (3,), 4), (2, (4, 3, 2), 1), (1, (1,), 4)]
    prune(store, read_line(store), {1, 3, 4}, clock=HandClock(), grace_s=0)
    found = inventory(store)
    assert found.amounts["referenced"].objects == 1
    assert losses(found) == [(4, (4,), 3), (3, (3,), 4), (2, (4, 3), 1), (1, (1,), 4)]
    prune(store, read_line(store), {3, 4}, clock=HandClock(), grace_s=0)
    assert (2, (4, 3), None) in losses(inventory(store))


def test_what_is_said_of_a_loss_is_what_happens() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    base = save_sharing(store, claim, 1, a_state(1, frozen=5))
    commit(store, base)
    for step in (2, 3, 4, 5):
        saved = save_sharing(store, claim, step, a_state(step), base)
        commit(store, saved)
        base = saved if step == 3 else base
    for loss in inventory(store).losses:
        copy = MemoryStore()
        copy._objects = dict(store._objects)
        for key in [key for key in copy.list("data/") if f"/{loss.attempt.step:012d}-" in key]:
            copy.delete(key)
        line = read_line(copy)
        bad = {one.step for one in verify(copy, line.commits, deep=True, line=line).bad}
        assert bad == set(loss.takes)
        whole = [one.step for one in line.commits if one.step not in bad]
        assert loss.left == (whole[0] if whole else None)
