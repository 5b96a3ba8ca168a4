"""Agents agree on who is in a round, through a store that can only create, list and read."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilient.elastic.conf import Conf
from resilient.elastic.documents import Ended, Reach
from resilient.elastic.joining import JobOver
from resilient.elastic.node import Node, Parked
from resilient.elastic.rounds import MESH
from resilient.errors import ConflictError, PeerError
from resilient.store.memory import MemoryStore
from tests.elastic.agents import QUICK, FakeAgent, in_thread
from tests.elastic.test_liveness import until
from tests.elastic.test_rounds import AGREEMENT

Make = Callable[..., FakeAgent]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore, tmp_path: Path) -> Iterator[Make]:
    made: list[FakeAgent] = []

    def one(**how: Any) -> FakeAgent:
        made.append(FakeAgent(store, tmp_path, **how))
        return made[-1]

    yield one
    for each in made:
        each.kill()


def patient(**changes: float) -> Conf:
    return Conf(**{**{name: getattr(QUICK, name) for name in Conf.__dataclass_fields__}, **changes})


def test_all_agree_on_one_round_and_its_order(make: Make) -> None:
    agents = [make(least=4, most=4) for _ in range(4)]
    rounds = [each.result(60) for each in [agent.start() for agent in agents]]
    assert {each.by for each in rounds} == {rounds[0].by}
    assert all(each == rounds[0] for each in rounds)
    assert set(rounds[0].nonces) == {agent.nonce for agent in agents}
    assert (rounds[0].address, rounds[0].port) == ("127.0.0.1", 1)


def test_whoever_dies_the_first_included_the_others_go_on(make: Make) -> None:
    agents = [make(most=4) for _ in range(4)]
    first, *_ = [each.result(60) for each in [agent.start() for agent in agents]]
    agents.sort(key=lambda agent: first.nonces.index(agent.nonce))
    left, seed = list(agents), random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for doomed in (agents[0], rng.choice(agents[1:])):
        doomed.kill()
        left.remove(doomed)
        for agent in left:
            until(lambda agent=agent: agent.membership.reform)  # type: ignore[misc]
            assert "is lost" in (agent.membership.reform or "")  # type: ignore[union-attr]
        rounds = [each.result(60) for each in [agent.start() for agent in left]]
        assert [list(each.nonces) for each in rounds] == [[agent.nonce for agent in left]] * len(left)
        assert rounds[0].job == first.job


def test_surplus_nodes_wait_as_spares_and_take_the_place_of_the_lost(make: Make) -> None:
    agents = [make(least=2, most=2) for _ in range(3)]
    forming = {agent: agent.start() for agent in agents}
    until(lambda: sum(each.done() for each in forming.values()) == 2)
    (spare,) = [agent for agent, each in forming.items() if not each.done()]
    members = [agent for agent in agents if agent is not spare]
    time.sleep(3 * QUICK.deaf_timeout)
    assert all(agent.membership.reform is None for agent in members), "a spare changes nothing"  # type: ignore[union-attr]
    members[0].kill()
    until(lambda: members[1].membership.reform)  # type: ignore[union-attr]
    last = members[1].start().result(60)
    assert forming[spare].result(60) == last
    assert list(last.nonces) == [members[1].nonce, spare.nonce]


def test_one_who_comes_late_is_let_in_without_any_loss(make: Make) -> None:
    first = make(most=2)
    assert len(first.start().result(60).members) == 1
    late = make(most=2).start()
    membership = first.membership
    assert membership is not None
    worker = Node(first.me.node.directory)
    until(worker.asked)
    time.sleep(2 * QUICK.deaf_timeout)
    assert membership.reform is None, "workers that look at what they are asked for get the time to save"
    worker.park(Parked(kind="resize", local_rank=0, pid=1, step=7))
    until(lambda: membership.reform)
    assert "asks to be let in" in str(membership.reform)
    assert len(first.start().result(60).members) == 2
    assert late.result(60).nonces[0] == first.nonce


@pytest.mark.field_report("BR-191")
def test_nodes_that_come_one_after_another_all_get_in(make: Make) -> None:
    agents = [make(most=8) for _ in range(8)]

    def live(agent: FakeAgent) -> None:
        """Form one round after another, as torchelastic does, until all are in one."""
        while len(agent.form().members) < 8:
            until(lambda: agent.membership and agent.membership.reform)

    lives = []
    for agent in agents:
        lives.append(in_thread(functools.partial(live, agent)))
        time.sleep(0.4)
    for each in lives:
        each.result(60)
    assert len({agent.membership.closed.nonces for agent in agents if agent.membership}) == 1


def test_who_still_waits_when_the_job_ends_is_not_needed(make: Make) -> None:
    first = make(most=1)
    first.start().result(60)
    spare = make(most=1).start()
    membership = first.membership
    assert membership is not None
    until(lambda: membership.known.waiting)
    membership.finish()
    with pytest.raises(JobOver):
        spare.result(60)


def test_a_job_that_is_over_or_dead_does_not_trap_the_next_one_of_the_same_id(make: Make) -> None:
    first = make(most=1)
    before = first.start().result(60)
    first.membership.finish()  # type: ignore[union-attr]
    first.kill()
    second = make(most=1)
    again = second.start().result(60)
    assert (again.round, again.nonces) == (2, (second.nonce,))
    assert again.job != before.job, "it is another start of the job"
    second.kill()  # and nobody has said so
    third = make(most=1)
    start = time.monotonic()
    assert third.start().result(60).round == 3
    assert time.monotonic() - start < 15, "its host says that it is dead: nothing is waited for"


def test_a_round_that_was_left_half_open_does_not_trap_the_next_start(make: Make) -> None:
    dead = make(least=2, most=2, conf=patient(join_timeout=60))
    forming = dead.start()
    until(lambda: dead.me.ledger.names(1) >= {f"join/{dead.nonce}", f"reach/{dead.nonce}"})
    dead.kill()
    assert isinstance(forming.exception(60), Exception)
    two = [make(least=2, most=2) for _ in range(2)]
    for each in [agent.start() for agent in two]:
        assert set(each.result(60).nonces) == {agent.nonce for agent in two}


def test_a_member_that_nobody_reaches_but_that_lives_is_not_passed_over(make: Make, store: MemoryStore) -> None:
    first = make(most=1)
    closed = first.start(look=False).result(60)
    first.me.listener.close()
    # Silent, not dead: an address to which no packet finds its way would take the test a minute.
    joining = make(most=1)
    alive = Reach(nonce=first.nonce, count=1, reached={}, unreached={})
    first.me.ledger.write_reach(1, alive)
    from resilient.elastic.joining import Joining
    from resilient.elastic.membership import Asking

    seen = Joining(joining.me, previous=None, start_store=lambda: 1, asking=Asking, stopped=lambda: None)
    assert set(seen.moving(1, closed.nonces)) == {first.nonce}
    seen._moved = {key: (count, at - 60) for key, (count, at) in seen._moved.items()}
    assert not seen.moving(1, closed.nonces), "its sign has not moved for a minute"
    first.me.ledger.write_reach(1, msgspec.structs.replace(alive, count=2))
    assert set(seen.moving(1, closed.nonces)) == {first.nonce}


def test_another_script_torch_or_version_is_refused_by_name_and_the_job_goes_on(make: Make) -> None:
    first = make(most=2)
    first.start().result(60)
    stranger = make(most=2, agreement=msgspec.structs.replace(AGREEMENT, command="x", command_text="other.py"))
    with pytest.raises(ConflictError, match=r"does not fit in: host\d+ .* runs the command 'train.py' instead of"):
        stranger.start().result(60)
    other = make(most=2, agreement=msgspec.structs.replace(AGREEMENT, torch="1.0"))
    with pytest.raises(ConflictError, match="torch 2 instead of 1"):
        other.start().result(60)
    assert first.membership is not None
    assert first.membership.reform is None


def test_in_an_open_round_who_came_later_with_another_script_is_refused(make: Make) -> None:
    first = make(least=2, most=2)
    forming = first.start()
    until(lambda: first.me.ledger.names(1))
    stranger = make(least=2, most=2, agreement=msgspec.structs.replace(AGREEMENT, command="x", command_text="o.py"))
    with pytest.raises(ConflictError, match="does not fit in"):
        stranger.start().result(60)
    fitting = make(least=2, most=2).start()
    assert first.nonce in fitting.result(60).nonces
    assert forming.result(60) == fitting.result(60)


def test_too_few_nodes_end_in_an_error_that_names_who_is_there_and_who_is_missing(make: Make) -> None:
    agents = [make(least=2, most=2, conf=patient(join_timeout=3)) for _ in range(2)]
    for each in [agent.start() for agent in agents]:
        each.result(60)
    agents[1].kill()
    membership = agents[0].membership
    until(lambda: membership.reform)  # type: ignore[union-attr]
    with pytest.raises(PeerError) as caught:
        agents[0].start().result(60)
    said = str(caught.value)
    assert "1 of at least 2 nodes are there" in said
    assert f"there: {agents[0].me.agent.title}" in said
    assert f"missing: {agents[1].me.agent.title}, lost: " in said


def test_one_that_the_others_cannot_reach_is_left_out_and_waits(make: Make) -> None:
    two = [make(least=2, most=3) for _ in range(2)]
    with_no_way = make(least=2, most=3, port=9)  # nobody listens there
    isolated = with_no_way.start()
    rounds = [each.result(60) for each in [agent.start() for agent in two]]
    assert all(set(each.nonces) == {agent.nonce for agent in two} for each in rounds)
    assert not isolated.done()
    membership = two[0].membership
    assert membership is not None
    time.sleep(1)
    assert membership.reform is None, "who cannot take part does not make the others start anew"
    with_no_way.killed.set()


def test_a_new_size_is_in_force_in_the_next_round_and_who_is_left_over_is_a_spare(make: Make) -> None:
    agents = [make(most=3) for _ in range(3)]
    closed, *_ = [each.result(60) for each in [agent.start() for agent in agents]]
    agents.sort(key=lambda agent: closed.nonces.index(agent.nonce))
    from resilient.catalog.requests import ask
    from resilient.clock import SYSTEM_CLOCK

    store = agents[0].me.ledger.store
    ask(store, "resize", nodes=1, why="another job", clock=SYSTEM_CLOCK)
    for agent in agents:
        until(lambda agent=agent: agent.membership.reform)  # type: ignore[misc]
    forming = {agent: agent.start() for agent in agents}
    assert forming[agents[0]].result(60).nonces == (agents[0].nonce,)
    assert forming[agents[0]].result().target == 1
    time.sleep(1)
    assert not forming[agents[1]].done()
    assert agents[0].membership is not None
    assert agents[0].membership.reform is None, "two wait, but one is what was asked for"
    ask(store, "resize", nodes=3, why="the other job is over", clock=SYSTEM_CLOCK)
    until(lambda: agents[0].membership.reform)  # type: ignore[union-attr]
    assert len(agents[0].start().result(60).members) == 3
    assert forming[agents[2]].result(60).nonces[0] == agents[0].nonce


def test_the_end_of_a_job_is_no_end_of_a_later_one(make: Make, store: MemoryStore) -> None:
    first = make(most=1)
    first.start().result(60)
    first.me.ledger.write_ended(1, Ended(by=first.nonce, created=""))
    first.kill()
    second = make(most=1)
    assert second.start().result(60).round == 2
    assert not second.me.ledger.has_ended(2)


@pytest.mark.timeout(200)
def test_more_nodes_than_can_all_watch_each_other_agree_too_and_notice_a_death(make: Make) -> None:
    size = MESH + 6
    conf = patient(ping_timeout=5.0, join_timeout=120, survivors_timeout=60)
    agents = [make(least=size - 1, most=size, conf=conf) for _ in range(size)]
    rounds = [each.result(120) for each in [agent.start() for agent in agents]]
    assert all(each == rounds[0] for each in rounds)
    assert len(rounds[0].members) == size
    doomed = next(agent for agent in agents if agent.nonce == rounds[0].nonces[3])
    doomed.kill()
    left = [agent for agent in agents if agent is not doomed]
    for agent in left:
        until(lambda agent=agent: agent.membership.reform, timeout_s=60)  # type: ignore[misc]
    again = [each.result(120) for each in [agent.start() for agent in left]]
    assert all(each == again[0] for each in again)
    assert [nonce for nonce in rounds[0].nonces if nonce != doomed.nonce] == list(again[0].nonces)
