"""Whether a place is a run: an empty place, a foreign one, a damaged one, a newer one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from resilient.catalog.generations import claim_generation, read_claim
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError, ErrorKind, NotFoundError, UsageError
from resilient.format.frame import seal_json
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.store.probe import probe
from tests.catalog.runs import new_generation, save


def test_a_run_is_made_once_and_found_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    probe(store)
    made = open_run(store, create=True, clock=SYSTEM_CLOCK)
    assert open_run(store, create=True, clock=SYSTEM_CLOCK) == made
    assert open_run(store, create=False, clock=SYSTEM_CLOCK) == made


@pytest.mark.parametrize("there", [True, False])
def test_nothing_there_is_said(tmp_path: Path, there: bool) -> None:
    place = tmp_path / "run"
    if there:
        place.mkdir()
    with pytest.raises(NotFoundError) as caught:
        open_run(LocalStore(place), create=False, clock=SYSTEM_CLOCK)
    assert caught.value.kind is ErrorKind.NO_CHECKPOINT
    assert str(place) in str(caught.value)


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("name", ["model.pt", "logs/today.txt"])
def test_a_foreign_directory_is_named_and_left_alone(tmp_path: Path, name: str, create: bool) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x")
    with pytest.raises(UsageError) as caught:
        open_run(LocalStore(tmp_path), create=create, clock=SYSTEM_CLOCK)
    assert caught.value.kind is ErrorKind.NOT_A_RUN
    shown = name.partition("/")[0]
    assert shown in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [shown]


def test_traces_of_a_probe_that_was_killed_do_not_make_a_place_foreign() -> None:
    store = MemoryStore()
    store.create("control/probe-1", b"1")
    open_run(store, create=True, clock=SYSTEM_CLOCK)


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("damage", ["remove", "flip", "empty"])
def test_a_run_whose_own_document_is_damaged_is_never_taken_for_an_empty_place(damage: str, create: bool) -> None:
    store = MemoryStore()
    save(store, new_generation(store), 1)
    content = bytearray(store.get("run.json"))
    content[10] ^= 1
    if damage == "remove":
        store.delete("run.json")
    else:
        store.put("run.json", [content if damage == "flip" else b""])
    with pytest.raises(CorruptError, match=r"run\.json"):
        open_run(store, create=create, clock=SYSTEM_CLOCK)


@pytest.mark.field_report("BR-202")
def test_a_newer_format_is_refused_by_name() -> None:
    store = MemoryStore()
    store.put("run.json", [seal_json({"format": 9, "kind": "run", "run_id": "a", "created": "b", "new": 1})])
    with pytest.raises(CorruptError) as caught:
        open_run(store, create=True, clock=SYSTEM_CLOCK)
    assert caught.value.kind is ErrorKind.NEWER_FORMAT
    assert "format 9" in str(caught.value)


def test_a_claim_says_who_and_where() -> None:
    store = MemoryStore()
    claim = claim_generation(store, world_size=4, launch="job", heartbeat=True)
    assert read_claim(store, 1) == claim
    assert (claim.generation, claim.world_size, claim.launch, claim.heartbeat) == (1, 4, "job", True)
    assert {"python", "resilient", "torch"} <= set(claim.versions)
    assert claim.process_started


class Tearing(MemoryStore):
    """Shows half an object while it is written, as most file systems behind fsspec do."""

    capabilities = replace(MemoryStore.capabilities, conditional_create=False, atomic_put=False)


@pytest.mark.parametrize("nbytes", [0, 20])
def test_half_a_document_of_somebody_who_was_killed_does_not_block_a_place(nbytes: int) -> None:
    torn = Tearing()
    open_run(torn, create=True, clock=SYSTEM_CLOCK)
    torn.put("run.json", [torn.get("run.json")[:nbytes]])
    with pytest.raises(NotFoundError):
        open_run(torn, create=False, clock=SYSTEM_CLOCK)
    made = open_run(torn, create=True, clock=SYSTEM_CLOCK)
    assert open_run(torn, create=False, clock=SYSTEM_CLOCK) == made
    new_generation(torn)
    torn.put("run.json", [torn.get("run.json")[:nbytes]])  # now somebody has relied on it: this is damage
    with pytest.raises(CorruptError):
        open_run(torn, create=True, clock=SYSTEM_CLOCK)
