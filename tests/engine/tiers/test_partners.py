"""Which node keeps whose copies, and when a state counts as being on all of them."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.tiers.complete import Complete
from resilient.engine.tiers.partners import Partners, partner_of
from resilient.format.documents import Claim
from resilient.writer.messages import Address
from tests.engine.rank_threads import SharedValues, on_ranks

CLAIM = Claim(
    generation=1,
    nonce="0" * 16,
    launch="0" * 32,
    world_size=3,
    host="host",
    pid=1,
    process_started="",
    created="",
    versions={},
)


@settings(deadline=None, derandomize=True)  # other processes may have the processors
@given(st.lists(st.integers(1, 4), min_size=2, max_size=9))
def test_each_node_keeps_the_copies_of_one_other_node(sizes: list[int]) -> None:
    places = [(f"node-{node}", f"label-{node}") for node, size in enumerate(sizes) for _ in range(size)]
    keepers = [partner_of(rank, places) for rank in range(len(places))]
    pairs = {(places[rank][0], places[keeper][0]) for rank, keeper in enumerate(keepers) if keeper is not None}
    assert None not in keepers
    assert (
        Counter(node for node, _ in pairs)
        == Counter(node for _, node in pairs)
        == Counter(f"node-{n}" for n in range(len(sizes)))
    )
    assert all(node != other for node, other in pairs)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_copy_never_stays_in_its_failure_domain(labels: list[int]) -> None:
    places = [(f"node-{node}", f"label-{label}") for node, label in enumerate(labels)]
    for rank, (_, label) in enumerate(places):
        keeper = partner_of(rank, places)
        if len(set(labels)) == 1:
            assert keeper is None
        else:
            assert keeper is not None
            assert places[keeper][1] != label


def test_ranks_find_where_their_copies_go_also_when_that_changes() -> None:
    def meet(peers: Peers) -> list[Address | None]:
        partners = Partners(CLAIM, peers)
        partners.listens(1000 + peers.rank, "word")
        partners.meet(node=f"node-{peers.rank}", label=f"label-{peers.rank}", master=None, timeout_s=30)
        peers.gather("met", b"", 30)
        found = [partners.address()]
        peers.gather("looked", b"", 30)
        partners.listens(2000 + peers.rank, "another")
        peers.gather("again", b"", 30)
        return [*found, partners.address()]

    answers = on_ranks(3, meet)
    for rank, answer in enumerate(answers):
        assert answer == [
            Address(host="127.0.0.1", port=port + (rank + 1) % 3, token=word)
            for port, word in ((1000, "word"), (2000, "another"))
        ]


def test_a_step_is_complete_when_the_last_rank_has_it_and_not_before() -> None:
    values = SharedValues()
    ranks = [Complete(CLAIM, Peers(rank, 3, values), what="tiers", clock=SYSTEM_CLOCK) for rank in range(3)]
    told: list[int] = []
    ranks[0].told = told.append
    for rank in ranks:
        rank.written(4)
    wait_for(ranks, 4)
    for rank in ranks[:2]:
        rank.written(7)
    time.sleep(0.2)
    assert [rank.newest() for rank in ranks] == [4, 4, 4]
    for rank in ranks:
        rank.written(9)
    wait_for(ranks, 9)
    assert told == [4, 9]
    for rank in ranks:
        rank.close()


def test_one_rank_alone_has_what_it_has_written() -> None:
    alone = Complete(CLAIM, Peers(0, 1, SharedValues()), what="tiers", clock=SYSTEM_CLOCK)
    alone.written(3)
    wait_for([alone], 3)
    alone.close()


def wait_for(ranks: list[Complete], step: int) -> None:
    end = time.monotonic() + 30
    while any(rank.newest() != step for rank in ranks):
        assert time.monotonic() < end, [rank.newest() for rank in ranks]
        time.sleep(0.01)
