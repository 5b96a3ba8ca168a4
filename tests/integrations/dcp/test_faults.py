"""A failure in any hook on any rank: every rank learns which ranks failed, and nothing of the save is visible."""

from __future__ import annotations

from pathlib import Path

import pytest

import resilient
from resilient.catalog.line import read_line
from resilient.store.local import LocalStore
from tests.integrations.dcp import faulty
from tests.ranks import Ranks

ON_ALL = ["set_up_storage_writer", "prepare_local_plan", "write_data", "write_data later"]
ON_COORDINATOR = ["prepare_global_plan", "finish"]
READING = ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "read_data", "read_data later"]


def cases(hooks: list[str], coordinator: list[str], size: int) -> list[faulty.Faults]:
    some = [[0], [size - 1], list(range(size))] + ([[1, 2]] if size > 2 else [])
    return [*({hook: bad} for hook in hooks for bad in some), *({hook: [0]} for hook in coordinator)]


def blamed(case: faulty.Faults) -> list[int]:
    (bad,) = case.values()
    return bad


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.field_report("BR-053")
def test_a_save_that_fails_blames_the_right_ranks_and_leaves_nothing(
    tmp_path: Path, ranks: Ranks, size: int, asynchronous: bool
) -> None:
    url = str(tmp_path / "run")
    ranks(size).run(faulty.save, url, 1)
    tried = cases(ON_ALL, ON_COORDINATOR, size)
    for found in ranks(size).run(faulty.all_saves, url, tried, asynchronous):
        assert found == [blamed(case) for case in tried]
    line = read_line(LocalStore(url))
    assert [commit.step for commit in line.commits] == [1]
    assert not line.ignored
    assert resilient.checkpoints(url)[0].verify().ok
    assert ranks(size).run(faulty.load, url) == [[]] * size
    # The step that failed so often can be saved as if nothing had been.
    ranks(size).run(faulty.save, url, 2)
    assert [checkpoint.step for checkpoint in resilient.checkpoints(url)] == [2, 1]
    assert ranks(size).run(faulty.load, url) == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_a_load_that_fails_blames_the_right_ranks(tmp_path: Path, ranks: Ranks, size: int) -> None:
    url = str(tmp_path / "run")
    ranks(size).run(faulty.save, url, 1)
    tried = cases(READING[1:], ["prepare_global_plan"], size)
    for found in ranks(size).run(faulty.all_loads, url, tried):
        assert found == [blamed(case) for case in tried]
    assert ranks(size).run(faulty.load, url) == [[]] * size


@pytest.mark.field_report("BR-104")
def test_an_object_that_cannot_be_stored_is_named_on_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    url = str(tmp_path / "run")
    for said in ranks(2).run(faulty.save_values, url, [1]):
        (only,) = said
        assert only.startswith("1: state_dict: of rank 1 is a function")
    assert resilient.checkpoints(url) == []
