"""`check_run` finds what must never be, and nothing in a run that is as it should be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from resilient.catalog.commit import try_commit, write_receipt
from resilient.catalog.generations import claim_generation
from resilient.catalog.line import read_line
from resilient.catalog.prune import give_up, prune
from resilient.catalog.references import refer
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import StoreError
from resilient.format import layout
from resilient.format.documents import Claim, Commit, Object
from resilient.store.base import Capabilities
from resilient.store.memory import MemoryStore
from resilient.testing.faulty_store import Fault, FaultyStore, Mode
from resilient.testing.invariants import check_run, read_arrays
from tests.catalog.runs import ReceiptMaker, attempt_of, commit_of, new_generation, save, tensors_of


class Tearing(MemoryStore):
    capabilities = Capabilities(conditional_create=True, atomic_put=False, ranged_read=True)


def expected(step: int) -> Mapping[str, npt.NDArray[Any]]:
    arrays = {f"model.{name}": array for name, array in tensors_of(step).items()}
    return arrays | {"model.tied": arrays["model.b"], "rng.rank1.state": np.full(2, 10 * step + 1)}


def a_run(store: MemoryStore) -> tuple[Claim, Claim]:
    """Save steps 1 to 3, go back to 2, save 3 and 4 again; 5 is not finished."""
    first = new_generation(store)
    for step in (1, 2, 3):
        save(store, first, step)
    second = new_generation(store, read_line(store).at(2), launch="b")
    for step in (3, 4):
        save(store, second, step)
    save(store, second, 5, commit=False)
    return first, second


def invariants(store: MemoryStore, **asked: Any) -> set[str]:
    return {violation.invariant for violation in check_run(store, expected=expected, **asked)}


def test_nothing_is_wrong_with_a_run_that_is_as_it_should_be() -> None:
    store = MemoryStore()
    first, _ = a_run(store)
    assert check_run(store, at_least=4, expected=expected) == []
    save(store, first, 7)  # a zombie of the first generation
    prune(store, read_line(store), {4}, clock=SYSTEM_CLOCK)
    assert check_run(store, at_least=4, expected=expected) == []
    prune(store, read_line(store), {4}, clock=SYSTEM_CLOCK)
    assert check_run(store, at_least=4, expected=expected) == []
    claim_generation(store, world_size=1, launch="c", heartbeat=False)
    assert check_run(store, at_least=4, expected=expected) == []


def test_torn_attempts_are_no_violation_as_long_as_nobody_sees_them() -> None:
    store = Tearing()
    _, claim = a_run(store)
    faulty = FaultyStore(store, Fault(mode=Mode.TEAR, verbs=frozenset({"create"}), key="*/COMMIT"))
    with pytest.raises(StoreError):
        try_commit(faulty, attempt_of(claim, 5), world_size=2, committer=0, reason="test", clock=SYSTEM_CLOCK)
    assert store.size(attempt_of(claim, 5).commit) > 0
    assert check_run(store, at_least=4, expected=expected) == []
    assert [str(violation) for violation in check_run(store, at_least=5)] == [
        "what was reported as saved is there: step 5 was reported as saved, and step 4 is the newest"
    ]


def test_a_place_where_nothing_is_keeps_all_promises_but_that_of_a_reported_step() -> None:
    assert check_run(MemoryStore()) == []
    assert [str(found) for found in check_run(MemoryStore(), at_least=1)] == [
        "what was reported as saved is there: step 1 was reported as saved, and there is no checkpoint"
    ]


def some(store: MemoryStore, prefix: str) -> str:
    return min(store.list(prefix))


def flip(store: MemoryStore, key: str) -> None:
    content = bytearray(store.get(key))
    content[len(content) // 2] ^= 4
    store.put(key, [content])


def listed(store: MemoryStore) -> Commit:
    return read_line(store).commits[0]


def lose_manifest_of_the_past(store: MemoryStore) -> None:
    (zombie,) = [key for key in store.list("steps/") if "000000000003/g00000001" in key and "/manifest-" in key]
    store.delete(zombie)


DAMAGES: list[tuple[str, Callable[[MemoryStore], None], set[str]]] = [
    ("a flipped bit", lambda store: flip(store, some(store, "data/")), {"what is listed is whole"}),
    ("a lost object", lambda store: store.delete(some(store, "data/")), {"what is listed is whole"}),
    (
        "a truncated object",
        lambda store: store.put(key := some(store, "data/"), [store.get(key)[:-1]]),
        {"what is listed is whole"},
    ),
    ("a lost receipt", lambda store: store.delete(listed(store).attempt.receipt(1)), {"what is listed is whole"}),
    (
        "a lost manifest",
        lambda store: store.delete(listed(store).attempt.manifest(listed(store).manifest)),
        {"what is listed is whole", "no COMMIT without its manifest"},
    ),
    ("a lost manifest beside the line", lose_manifest_of_the_past, {"no COMMIT without its manifest"}),
    (
        "a lost COMMIT",
        lambda store: store.delete(listed(store).attempt.commit),
        {"what was reported as saved is there"},
    ),
    (
        "a newest checkpoint that was given up",
        lambda store: give_up(store, listed(store).attempt, SYSTEM_CLOCK, reason="test"),
        {"what was reported as saved is there"},
    ),
    ("a damaged base", lambda store: flip(store, layout.base(2)), {"no damage hides checkpoints"}),
    ("a damaged run.json", lambda store: flip(store, layout.RUN), {"the run can be read"}),
]


@pytest.mark.parametrize(("damage", "broken"), [each[1:] for each in DAMAGES], ids=[each[0] for each in DAMAGES])
def test_damage_is_found_and_named(damage: Callable[[MemoryStore], None], broken: set[str]) -> None:
    store = MemoryStore()
    a_run(store)
    damage(store)
    assert invariants(store, at_least=4) == broken


def test_a_tombstone_that_the_line_overlooks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    a_run(store)
    line = read_line(store)
    give_up(store, line.commits[1].attempt, SYSTEM_CLOCK, reason="test")
    monkeypatch.setattr("resilient.testing.invariants.read_line", lambda _: line)
    (violation,) = check_run(store, at_least=4, expected=expected)
    assert violation.invariant == "what was given up is not listed"
    assert violation.step == 3


def test_what_refers_without_a_mark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that shares an earlier attempt's object, by a committer that does not look for the mark."""
    store = MemoryStore()
    _, claim = a_run(store)
    shared, attempt = attempt_of(claim, 4).data(0, 9), attempt_of(claim, 6)
    maker = ReceiptMaker(attempt).tensor("w", tensors_of(6)["w"])
    store.put(shared, maker.data)
    receipt = maker.receipt()
    write_receipt(store, msgspec.structs.replace(receipt, objects=(Object(shared, receipt.objects[0].nbytes),)))
    monkeypatch.setattr("resilient.catalog.commit.check_references", lambda *_: None)
    assert isinstance(commit_of(store, attempt, world_size=1), Commit)
    (violation,) = check_run(store, at_least=6)
    assert (violation.invariant, violation.step) == ("what is referred to is protected", 6)
    assert shared in violation.detail
    assert refer(store, attempt_of(claim, 4), attempt)
    assert check_run(store, at_least=6) == []


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"model.w": tensors_of(5)["w"]}, "has other contents"),
        ({"model.w": tensors_of(4)["w"][:5]}, r"has \(6, 4\)"),
        ({"model.w": tensors_of(4)["w"].astype("float64")}, "of float32 instead"),
        ({"model.missing": tensors_of(4)["w"]}, "model.missing is not in it"),
    ],
    ids=["contents", "shape", "dtype", "missing"],
)
def test_other_contents_than_expected_are_found(wanted: dict[str, npt.NDArray[Any]], why: str) -> None:
    store = MemoryStore()
    save(store, new_generation(store), 4)
    (violation,) = check_run(store, expected=lambda _: wanted)
    assert violation.invariant == "a checkpoint holds what was saved"
    assert re.search(why, violation.detail), violation.detail


def test_bits_are_compared_not_values() -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    special = np.array([np.nan, -0.0, np.inf], np.float32)
    ReceiptMaker(attempt).tensor("x", special).write(store)
    assert isinstance(commit_of(store, attempt, world_size=1), Commit)
    assert check_run(store, expected=lambda _: {"model.x": special}) == []
    assert check_run(store, expected=lambda _: {"model.x": np.abs(special)}) != []


def test_dtypes_that_numpy_lacks_come_as_integers_of_their_size() -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    maker = ReceiptMaker(attempt).tensor("x", np.arange(6, dtype=np.uint16).reshape(2, 3))
    (key,) = maker.tensors
    maker.tensors[key] = msgspec.structs.replace(maker.tensors[key], dtype="bfloat16")
    maker.write(store)
    assert isinstance(commit_of(store, attempt, world_size=1), Commit)
    found = read_arrays(store, listed(store))["model.x"]
    assert found.dtype == np.uint16
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_store_that_cannot_be_read_says_nothing_about_the_run() -> None:
    store = MemoryStore()
    a_run(store)
    with pytest.raises(StoreError):
        check_run(FaultyStore(store, Fault(mode=Mode.DENIED, verbs=frozenset({"list"}))))
