"""What a member takes for lost, what it asks of its workers, and how long it waits for others when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilient.catalog.requests import ask
from resilient.clock import SYSTEM_CLOCK
from resilient.elastic.documents import Reach
from resilient.elastic.node import Asked, Node, Parked
from resilient.errors import ErrorKind, StoreError
from resilient.store.memory import MemoryStore
from tests.elastic.agents import QUICK, FakeAgent, in_thread
from tests.elastic.test_liveness import until


class Away(MemoryStore):
    """A store that can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.refused = 0

    def _check(self) -> None:
        if self.away:
            self.refused += 1
            raise StoreError("the store is away", kind=ErrorKind.UNREACHABLE, retryable=True)

    def get(self, key: str) -> bytes:
        self._check()
        return super().get(key)

    def create(self, key: str, data: bytes) -> bool:
        self._check()
        return super().create(key, data)

    def list(self, prefix: str) -> Iterator[str]:
        self._check()
        return super().list(prefix)

    def put(self, key: str, parts: Any) -> None:
        self._check()
        super().put(key, parts)


@pytest.fixture
def store() -> Away:
    return Away()


@pytest.fixture
def formed(store: Away, tmp_path: Path) -> Iterator[Callable[..., list[FakeAgent]]]:
    made: list[FakeAgent] = []

    def form(count: int, **how: Any) -> list[FakeAgent]:
        made.extend(FakeAgent(store, tmp_path, **{"least": count, "most": count, **how}) for _ in range(count))
        first, *_ = [each.result(60) for each in [agent.start() for agent in made]]
        made.sort(key=lambda agent: first.nonces.index(agent.nonce))
        return list(made)

    yield form
    for each in made:
        each.kill()


def reform(agent: FakeAgent) -> str | None:
    assert agent.membership is not None
    return agent.membership.reform


def test_a_store_that_is_away_declares_nobody_dead_and_training_goes_on(
    store: Away, formed: Callable[..., list[FakeAgent]]
) -> None:
    first, second = formed(2)
    store.away = True
    until(lambda: store.refused > 5)
    time.sleep(3 * QUICK.poll_interval)
    assert reform(first) is None
    assert reform(second) is None
    second.kill()  # even one that is really gone: nobody can tell it from an outage of everything
    time.sleep(2 * QUICK.ping_timeout)
    assert reform(first) is None
    store.away = False
    until(lambda: reform(first))
    assert f"{second.me.agent.title} is lost" in str(reform(first))


def test_who_was_hidden_by_the_same_outage_as_the_store_is_tried_again_before_it_is_declared_lost(
    store: Away, formed: Callable[..., list[FakeAgent]]
) -> None:
    first, second = formed(2)
    assert first.membership is not None
    store.away = True
    watch = first.membership._watches._watched[second.nonce]
    from resilient.elastic.liveness import Gone

    watch.gone = Gone(why="no answer", certain=False, since=SYSTEM_CLOCK.monotonic() - 60)
    time.sleep(3 * QUICK.poll_interval)
    store.away = False
    until(lambda: first.membership and not first.membership._watches.gone())
    time.sleep(5 * QUICK.poll_interval)
    assert reform(first) is None
    assert not first.membership.known.lost


def test_workers_get_a_moment_to_notice_a_loss_themselves_and_are_told_that_they_are_started_anew(
    formed: Callable[..., list[FakeAgent]],
) -> None:
    first, second = formed(2)
    worker = Node(first.me.node.directory)
    worker.asked()
    second.kill()
    until(lambda: first.membership and first.membership.known.lost)
    time.sleep(0.5)
    assert reform(first) is None, "it has not parked yet"
    assert not worker.restarting()
    worker.park(Parked(kind="peer-failed", local_rank=0, pid=1))
    assert until(lambda: reform(first)) < 2
    assert worker.restarting()


def test_one_that_some_members_cannot_reach_is_not_let_in_again_and_again(
    store: Away, formed: Callable[..., list[FakeAgent]], tmp_path: Path
) -> None:
    first, second = formed(2, most=3)
    half = FakeAgent(store, tmp_path, most=3)
    cut = Reach(nonce=half.nonce, count=1, reached={first.nonce: 0}, unreached={second.nonce: "no answer"})
    half.me.ledger.write_reach(1, cut)
    half.me.ledger.wait(1, half.me.agent)
    until(lambda: first.membership and half.nonce in first.membership.known.waiting)
    time.sleep(4 * QUICK.deaf_timeout)
    assert reform(first) is None
    half.me.ledger.write_reach(1, msgspec.structs.replace(cut, count=2, unreached={}))
    until(lambda: reform(first))
    half.kill()


def test_one_that_leaves_is_not_waited_for_and_the_others_are_told(formed: Callable[..., list[FakeAgent]]) -> None:
    first, second = formed(2)
    assert second.membership is not None
    second.membership.leave("its agent ended")
    until(lambda: reform(first), timeout_s=10)
    assert "its agent ended" in str(reform(first))


def test_one_that_is_held_for_lost_learns_it_and_comes_back_as_a_new_one(
    formed: Callable[..., list[FakeAgent]],
) -> None:
    first, second = formed(2)
    assert first.membership is not None
    assert second.membership is not None
    second.membership.leave("the test says so")  # as if another one had declared it
    until(lambda: reform(second))
    assert "holds this node for lost" in str(reform(second))
    forming = second.start()
    closed = first.start().result(60)
    assert closed == forming.result(60)
    assert list(closed.nonces) == [first.nonce, second.nonce]


def test_workers_that_never_look_are_restarted_after_a_short_bound_and_such_as_do_get_the_long_one(
    store: Away, formed: Callable[..., list[FakeAgent]], tmp_path: Path
) -> None:
    (first,) = formed(1, most=2)
    formed_at = time.monotonic()
    late = FakeAgent(store, tmp_path, most=2)
    forming = late.start()
    until(lambda: reform(first))
    assert 3.5 < time.monotonic() - formed_at < 12, "until then they may have been bringing back their state"
    assert "did not park within 0.5 s" in str(reform(first))
    first.start().result(60)
    forming.result(60)
    worker = Node(first.me.node.directory)
    assert worker.asked() is None, "what was asked of the last workers is not asked of the next"
    ask(store, "resize", nodes=1, why="a test", clock=SYSTEM_CLOCK)
    until(lambda: worker.asked() == Asked(kind="resize", why="the job is asked to go on with 1 nodes"))
    time.sleep(3 * QUICK.deaf_timeout)
    assert reform(first) is None
    worker.park(Parked(kind="resize", local_rank=0, pid=1, step=3))
    until(lambda: reform(first))
    late.kill()


def test_a_stop_ends_workers_that_were_parked_before(store: Away, formed: Callable[..., list[FakeAgent]]) -> None:
    (first,) = formed(1)
    first.me.node.park(Parked(kind="resize", local_rank=0, pid=1, step=3))
    ask(store, "stop", why="maintenance", clock=SYSTEM_CLOCK)
    until(lambda: reform(first))
    assert reform(first) == "a stop was asked for"
    asked = first.me.node.asked_last()
    assert asked is not None
    assert asked.kind == "stop", "by which the agent knows that it is not to start them again"


def test_news_from_many_and_the_wait_for_workers_cost_the_store_few_looks(
    store: Away, formed: Callable[..., list[FakeAgent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = formed(1, most=2, conf=replace(QUICK, poll_interval=1.0))
    membership = first.membership
    assert membership is not None
    looks: list[float] = []
    look = membership.look

    def counted() -> None:
        looks.append(time.monotonic())
        look()

    monkeypatch.setattr(membership, "look", counted)
    Node(first.me.node.directory).asked()
    ask(store, "resize", nodes=1, why="a test", clock=SYSTEM_CLOCK)
    membership._asked_at = SYSTEM_CLOCK.monotonic()  # workers are waited for
    time.sleep(3)
    assert 2 <= len(looks) <= 4, "their files are looked at meanwhile"
    looks.clear()
    for _ in range(200):
        first.me.news.tell()
        time.sleep(0.005)
    assert 3 <= len(looks) <= 8
    first.me.node.park(Parked(kind="resize", local_rank=0, pid=1, step=3))
    assert until(lambda: reform(first)) < 0.9


def test_a_look_that_is_under_way_says_nothing_after_the_end(formed: Callable[..., list[FakeAgent]]) -> None:
    first, second = formed(2)
    assert first.membership is not None
    first.membership.close(wait_s=10)
    second.kill()
    first.membership._watches.watch([second.me.agent])
    first.membership.look()
    assert reform(first) is None
    assert not first.me.node.restarting()
    assert not first.membership._watches._watched


def test_a_request_to_stop_reaches_the_workers_and_makes_no_new_round(
    store: Away, formed: Callable[..., list[FakeAgent]]
) -> None:
    (first,) = formed(1)
    ask(store, "stop", why="maintenance", clock=SYSTEM_CLOCK)
    until(first.me.node.asked_last)
    asked = first.me.node.asked_last()
    assert asked is not None
    assert (asked.kind, asked.why) == ("stop", "a request to stop (maintenance)")
    assert first.me.node.listen() == 0, "the agent is none of those that have to look"
    time.sleep(3 * QUICK.deaf_timeout)
    assert reform(first) is None


def test_who_is_done_waits_for_the_others_but_not_for_the_dead(formed: Callable[..., list[FakeAgent]]) -> None:
    first, second, third = formed(3)
    assert first.membership is not None
    finishing = in_thread(first.membership.finish)
    time.sleep(0.5)
    assert not finishing.done(), "its key-value server is still used"
    second.kill()
    time.sleep(0.5)
    assert not finishing.done()
    assert third.membership is not None
    in_thread(third.membership.finish)
    finishing.result(30)
    assert first.me.ledger.has_ended(1)


def test_who_is_done_may_leave_and_is_not_taken_for_lost(formed: Callable[..., list[FakeAgent]]) -> None:
    first, second = formed(2)
    assert first.membership is not None
    in_thread(first.membership.finish)
    until(lambda: second.membership and first.nonce in second.membership.known.done)
    first.kill()
    time.sleep(3 * QUICK.ping_timeout)
    assert reform(second) is None
    assert second.membership is not None
    assert not second.membership.known.lost


def test_who_is_done_is_released_by_those_who_go_on_without_it(formed: Callable[..., list[FakeAgent]]) -> None:
    first, second, third = formed(3, least=2)
    assert first.membership is not None
    finishing = in_thread(first.membership.finish)
    until(lambda: second.membership and first.nonce in second.membership.known.done)
    third.kill()
    until(lambda: reform(second))
    assert second.start().result(60).nonces == (second.nonce,), "one of two that are needed is done"
    finishing.result(30)
    assert not first.me.ledger.has_ended(1), "the job goes on"


def test_who_is_done_does_not_wait_for_ever_for_a_store_that_is_away(
    store: Away, formed: Callable[..., list[FakeAgent]]
) -> None:
    first, second = formed(2)
    assert first.membership is not None
    store.away = True
    finishing = in_thread(first.membership.finish)
    time.sleep(0.5)
    assert not finishing.done()
    second.kill()
    finishing.result(30)
