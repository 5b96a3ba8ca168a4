"""Who closes a round, when, and with whom, is decided from what was observed alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from resilient.elastic.documents import Agent, Agreement, Closed, Reach
from resilient.elastic.rounds import (
    MESH,
    Close,
    Hold,
    Limits,
    Observed,
    address_for_all,
    connected_set,
    decide,
    in_order,
    to_watch,
)

AGREEMENT = Agreement(command="c", command_text="train.py", torch="2", resilient="1")


def agent(nonce: str, **changes: Any) -> Agent:
    made = Agent(
        nonce=nonce,
        host=f"host-{nonce}",
        pid=1,
        addresses=(f"host-{nonce}", f"10.0.0.{nonce}"),
        port=1,
        store_port=2,
        agreement=AGREEMENT,
        created=f"2026-01-01T00:00:{nonce:0>2}Z",
    )
    return msgspec.structs.replace(made, **changes)


def reach(nonce: str, everybody: Iterable[str], cut: Iterable[str] = ()) -> Reach:
    others = [each for each in everybody if each != nonce]
    return Reach(
        nonce=nonce,
        count=1,
        reached={each: 0 for each in others if each not in set(cut)},
        unreached=dict.fromkeys(set(cut), "no answer"),
    )


def closed(*nonces: str) -> Closed:
    members = tuple(map(agent, nonces))
    return Closed(
        round=1, job="j", members=members, master=nonces[0], address="a", port=2, target=0, request=0, by="", created=""
    )


def observed(me: str, nonces: str, *, cuts: Mapping[str, str] | None = None, **changes: Any) -> Observed:
    cuts = cuts or {}
    seen: dict[str, Any] = {
        "me": me,
        "joins": {nonce: agent(nonce) for nonce in nonces},
        "reaches": {nonce: reach(nonce, nonces, cuts.get(nonce, "")) for nonce in nonces},
        "since_s": 1.0,
        "quiet_s": 1.0,
        **changes,
    }
    return Observed(**seen)


def members(verdict: Close | Hold) -> str:
    assert isinstance(verdict, Close), verdict
    return "".join(member.nonce for member in verdict.members)


def test_a_fresh_round_is_closed_at_its_most_or_after_the_last_call() -> None:
    limits = Limits(least=2, most=3)
    assert isinstance(decide(observed("1", "1", since_s=100, quiet_s=100), limits), Hold), "too few"
    assert isinstance(decide(observed("1", "12"), limits), Hold), "others may come"
    assert members(decide(observed("1", "12", since_s=6, quiet_s=6), limits)) == "12"
    assert members(decide(observed("1", "123"), limits)) == "123"


def test_the_first_closes_and_the_others_only_if_it_does_not() -> None:
    limits = Limits(least=2, most=2)
    assert members(decide(observed("1", "12"), limits)) == "12"
    assert isinstance(decide(observed("2", "12"), limits), Hold)
    assert members(decide(observed("2", "12", quiet_s=3.5, since_s=3.5), limits)) == "12"


def test_who_goes_on_keeps_its_order_and_new_nodes_come_after() -> None:
    last = closed("4", "3", "2")
    seen = observed("4", "1234", last=last, expected=frozenset("432"))
    assert members(decide(seen, Limits(least=1, most=4))) == "4321"
    assert members(decide(seen, Limits(least=1, most=3))) == "432", "the new one is a spare"


def test_survivors_of_a_loss_go_on_at_once_when_all_are_there() -> None:
    last = closed("1", "2", "3")
    limits = Limits(least=1, most=3)
    alone = observed("2", "2", last=last, expected=frozenset("23"))
    assert isinstance(decide(alone, limits), Hold), "node 3 still stops its workers"
    halfway = observed("2", "23", last=last, expected=frozenset("23"), reaches={"2": reach("2", "2")})
    assert isinstance(decide(halfway, limits), Hold), "node 3 has joined, and not yet said whom it reaches"
    assert members(decide(observed("2", "23", last=last, expected=frozenset("23")), limits)) == "23"
    assert (
        members(decide(observed("2", "2", last=last, expected=frozenset("23"), since_s=61, quiet_s=61), limits)) == "2"
    )


def test_spares_that_wait_are_called_but_not_waited_for_long() -> None:
    last = closed("1", "2", "3")
    seen = observed("2", "23", last=last, expected=frozenset("23"), waiting=frozenset("4"))
    assert isinstance(decide(seen, Limits(least=1, most=3)), Hold)
    late = observed("2", "23", last=last, expected=frozenset("23"), waiting=frozenset("4"), since_s=6, quiet_s=6)
    assert members(decide(late, Limits(least=1, most=3))) == "23"
    assert members(decide(observed("2", "234", last=last, expected=frozenset("23")), Limits(least=1, most=3))) == "234"


def test_a_minority_that_lost_others_by_silence_waits_for_them_first() -> None:
    last = closed("1", "2", "3")
    seen = observed("1", "1", last=last, expected=frozenset("1"), doubtful=frozenset("23"))
    assert isinstance(decide(seen, Limits(least=1, most=3)), Hold)
    how: dict[str, Any] = {"last": last, "expected": frozenset("1"), "doubtful": frozenset("23")}
    called = observed("1", "1", **how, since_s=40, quiet_s=40)
    assert isinstance(decide(called, Limits(least=1, most=3)), Hold), "those who are more may take 30 s to stop workers"
    alone = observed("1", "1", **how, since_s=61, quiet_s=61)
    assert members(decide(alone, Limits(least=1, most=3))) == "1", "not for ever: they may be dead"
    half = observed("1", "1", last=closed("1", "2"), expected=frozenset("1"), doubtful=frozenset("2"))
    assert isinstance(decide(half, Limits(least=1, most=2)), Hold)
    certain = observed("1", "1", last=last, expected=frozenset("1"))
    assert members(decide(certain, Limits(least=1, most=3))) == "1", "their hosts said that they are dead"


def test_who_is_cut_off_leaves_the_round_to_the_larger_set_and_says_why() -> None:
    cuts = {"1": "23", "2": "1", "3": "1"}
    verdict = decide(observed("1", "123", cuts=cuts, since_s=60, quiet_s=60), Limits(least=1, most=3))
    assert isinstance(verdict, Hold)
    assert "host-1 (agent 1) does not reach host-2 (agent 1): no answer" in verdict.why
    assert members(decide(observed("2", "123", cuts=cuts, since_s=60, quiet_s=60), Limits(least=1, most=3))) == "23"


def test_members_that_are_done_are_not_missed() -> None:
    last = closed("1", "2")
    seen = observed("2", "2", last=last, expected=frozenset("2"), done=1)
    assert members(decide(seen, Limits(least=2, most=2))) == "2"


def test_pairs_that_nobody_has_tried_yet_are_waited_for_but_not_for_ever() -> None:
    seen = observed("1", "12", reaches={"1": reach("1", "1"), "2": reach("2", "12")})
    assert isinstance(decide(seen, Limits(least=2, most=2)), Hold)
    late = observed("1", "12", reaches={"1": reach("1", "1"), "2": reach("2", "12")}, quiet_s=7, since_s=7)
    assert members(decide(late, Limits(least=2, most=2))) == "12"


def test_an_address_that_works_for_all_is_taken_if_a_name_does_not() -> None:
    three = [agent(nonce) for nonce in "123"]
    reaches = {nonce: reach(nonce, "123") for nonce in "123"}
    assert address_for_all(three[0], three, reaches) == ("host-1", False)
    reaches["3"] = msgspec.structs.replace(reaches["3"], reached={"1": 1, "2": 0})
    assert address_for_all(three[0], three, reaches) == ("10.0.0.1", True)


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))), st.integers(1, 8))
def test_a_connected_set_is_connected_and_nobody_can_be_added(cut: set[tuple[int, int]], size: int) -> None:
    names = [str(number) for number in range(size)]
    pairs = {(str(one), str(other)) for one, other in cut if one != other}
    reaches = {one: reach(one, names, [other for other in names if (one, other) in pairs]) for one in names}

    def connected(one: str, other: str) -> bool:
        return (one, other) not in pairs and (other, one) not in pairs

    found = connected_set(names, reaches)
    assert found == sorted(found)
    assert all(connected(one, other) for one in found for other in found if one != other)
    assert not [extra for extra in names if extra not in found and all(connected(extra, each) for each in found)]


def test_one_first_node_with_a_bad_link_does_not_split_a_large_job() -> None:
    names = [f"{number:03}" for number in range(100)]
    alone = {**{each: reach(each, names) for each in names}, "000": reach("000", names, names[1:])}
    assert connected_set(names, alone) == names[1:]
    half = {**alone, "000": reach("000", names, names[40:])}
    assert connected_set(names, half) == names[1:]
    assert connected_set(names, {each: reach(each, names) for each in names}) == names


@given(st.integers(1, 60))
def test_everybody_is_watched_by_somebody(size: int) -> None:
    names = [str(number) for number in range(size)]
    watched = {name: to_watch(names, name) for name in names}
    assert all(name not in others for name, others in watched.items())
    if size > 1:
        assert {each for others in watched.values() for each in others} == set(names)
    assert max(len(others) for others in watched.values()) <= max(MESH - 1, 3)


def test_an_order_does_not_depend_on_the_order_of_arrival_in_a_listing() -> None:
    agents = [agent(nonce) for nonce in "4132"]
    last = closed("3", "1")
    assert [each.nonce for each in in_order(agents, last, frozenset("3"))] == ["3", "1", "2", "4"]
    assert in_order(agents, last, frozenset("3")) == in_order(agents[::-1], last, frozenset("3"))


def test_what_nodes_disagree_about_is_named() -> None:
    other = msgspec.structs.replace(AGREEMENT, torch="3")
    assert AGREEMENT.difference(other) == "torch 3 instead of 2"
    assert AGREEMENT.difference(msgspec.structs.replace(AGREEMENT, resilient="2")) == "resilient 2 instead of 1"
    moved = msgspec.structs.replace(AGREEMENT, command="d", command_text="other.py")
    assert AGREEMENT.difference(moved) == "the command 'other.py' instead of 'train.py'"
    assert "content" in str(AGREEMENT.difference(msgspec.structs.replace(AGREEMENT, command="d")))
    assert AGREEMENT.difference(msgspec.structs.replace(AGREEMENT, command="")) is None, "it could not be found out"
