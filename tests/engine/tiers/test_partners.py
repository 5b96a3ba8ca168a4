"""Which node keeps whose copies, and when a state counts as being on all of them."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.tiers import partners
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
        mine = Partners(CLAIM, peers)
        mine.listens(1000 + peers.rank, "word")
        mine.meet(node=f"node-{peers.rank}", label=f"label-{peers.rank}", master=None, timeout_s=30)
        peers.gather("met", b"", 30)
        found = [mine.address()]
        peers.gather("looked", b"", 30)
        mine.listens(2000 + peers.rank, "another")
        peers.gather("again", b"", 30)
        return [*found, mine.address()]

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


def test_a_state_that_some_rank_will_not_have_is_settled_at_once_and_never_complete() -> None:
    values = SharedValues()
    ranks = [Complete(CLAIM, Peers(rank, 2, values), what="tiers", clock=SYSTEM_CLOCK) for rank in range(2)]
    ranks[0].written(4)
    ranks[1].failed(4)
    end = time.monotonic() + 10
    while not ranks[1].settled(4):
        assert time.monotonic() < end
        ranks[1].newest()
    ranks[1].written(4)
    time.sleep(0.2)
    assert [rank.newest() for rank in ranks] == [None, None]
    for rank in ranks:
        rank.written(5)
    wait_for(ranks, 5)
    for rank in ranks:
        rank.close()


def test_the_first_host_does_not_send_others_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def towards(host: str, port: int) -> str:
        asked.append(host)
        return {"first": "127.0.1.1", "10.0.0.2": "10.0.0.1"}[host]

    monkeypatch.setattr(partners, "_source_towards", towards)
    own = partners._own_address("first:29500")
    assert own == "127.0.1.1"
    assert partners._seen_from_others(own, [own, "10.0.0.2"]) == "10.0.0.1"
    assert partners._seen_from_others("10.0.0.2", [own, "10.0.0.2"]) == "10.0.0.2"
    assert partners._seen_from_others(own, [own, own]) == own, "all on one host"


def test_nothing_is_copied_where_a_writer_takes_no_copies() -> None:
    def meet(peers: Peers) -> object:
        mine = Partners(CLAIM, peers)
        if peers.rank:
            mine.listens(1000, "word")
        mine.meet(node=f"node-{peers.rank}", label=f"label-{peers.rank}", master=None, timeout_s=30)
        return mine.copies, mine.deaf

    assert on_ranks(2, meet) == [(False, 0), (False, 0)]
