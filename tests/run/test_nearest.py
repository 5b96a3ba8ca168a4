"""What a start leaves in the tiers of its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.catalog.line import read_line
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Settings
from resilient.engine.peers import Peers
from resilient.engine.restore import RestoredFrom
from resilient.engine.tiers.places import NodeTiers
from resilient.events import Bus
from resilient.run.nearest import Nearest
from resilient.run.opening import Opened
from resilient.store.memory import MemoryStore
from resilient.writer.messages import Committed, Tiered
from tests.catalog.runs import new_generation
from tests.engine.rank_threads import SharedValues
from tests.writer.test_tiering import begin, close, near, order, tier


@pytest.mark.parametrize(("restored", "left"), [(True, [1]), (False, [])])
def test_of_lives_before_only_what_was_restored_stays_so_that_there_is_room_for_two(
    tmp_path: Path, restored: bool, left: list[int]
) -> None:
    store = MemoryStore()
    before = begin(store, tier(tmp_path))
    order(before, 1, stores=True)
    before.wait(Tiered, 1)
    assert isinstance(before.outcome(1), Committed)
    order(before, 2, stores=False, complete=1)
    before.wait(Tiered, 2)
    close(before)
    assert near(tmp_path) == [1, 2]
    commit = read_line(store).at(1) if restored else None
    opened = Opened(
        store=store,
        peers=Peers(0, 1, SharedValues()),
        claim=new_generation(store),
        run_id="0" * 16,
        created="",
        local_ranks=1,
        tiers=NodeTiers(own=(tier(tmp_path),)),
    )
    nearest = Nearest(opened, Settings(), bus=Bus(), clock=SYSTEM_CLOCK)
    nearest.tell(None if commit is None else RestoredFrom(commit=commit, nbytes_read=0))
    assert near(tmp_path) == left
