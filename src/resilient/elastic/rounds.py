"""When a round is closed, by whom and with whom: pure decisions over what one agent has observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from resilient.elastic.documents import Agent, Closed, Reach

MESH: Final = 16
"""So many nodes all watch each other. Of more, each one watches its successors."""

_SUCCESSORS: Final = 3
_TAKEOVER_S: Final = 3.0  # after so long the next one in order closes what the first one does not
_EVERY_START: Final = 64  # of so many nodes, a connected set is looked for from each one
_SOME_STARTS: Final = 16  # and of more from so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many nodes a round needs and takes, and how long it waits for more.

    ``last_call_s``: for nodes that may come. ``survivors_s``: for members of the last round that live, but have not
    joined: they stop their workers, for which torchelastic grants 30 s.
    """

    least: int
    most: int
    last_call_s: float = 5.0
    survivors_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """An open round, as one of those who have joined it sees it.

    ``reaches``: of those that were seen to live. ``expected``: members of the last round that live, as far as known.
    ``waiting``: who asked to be let in and lives. ``doubtful``: members of the last round that fell silent, so that
    they may live where we cannot see them. ``done``: so many members have finished their work, and are not missed.
    ``since_s``: since I joined; ``quiet_s``: since the last one joined.
    """

    me: str
    joins: Mapping[str, Agent]
    reaches: Mapping[str, Reach]
    last: Closed | None = None
    expected: frozenset[str] = field(default_factory=frozenset)
    waiting: frozenset[str] = field(default_factory=frozenset)
    doubtful: frozenset[str] = field(default_factory=frozenset)
    done: int = 0
    since_s: float
    quiet_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Close the round with these members, in this order."""

    members: tuple[Agent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Do not close the round yet; ``why`` is for people."""

    why: str


def decide(seen: Observed, limits: Limits) -> Close | Hold:
    """Say whether I close the round now.

    Only the first of the connected set does, and the others one after another if it does not, so that few try. If two
    do, the store decides; nothing here has to be agreed on.
    """
    order = in_order(seen.joins.values(), seen.last, seen.expected)
    alive = [agent.nonce for agent in order if agent.nonce in seen.reaches]
    if seen.me not in alive:
        return Hold(why="what I have written is not there yet")
    if untried := _untried(alive, seen):
        return Hold(why=f"it is being tried who reaches whom ({untried} pairs are left)")
    connected = connected_set(alive, seen.reaches)
    if seen.me not in connected:
        return Hold(why=f"{_titles(connected, seen)} take part; {cut_off(seen.me, connected, seen)}")
    held = _held(connected, seen, limits)
    if held is not None:
        return held
    position = connected.index(seen.me)
    if seen.quiet_s < _TAKEOVER_S * position:
        return Hold(why=f"{_titles(connected[:1], seen)} is about to close the round")
    return Close(members=tuple(seen.joins[nonce] for nonce in connected[: limits.most]))


def _held(connected: Sequence[str], seen: Observed, limits: Limits) -> Hold | None:  # noqa: PLR0911 -- one reason after another
    """Say for whom the round has to wait, if it has to."""
    least = max(1, limits.least - seen.done)
    missing = seen.expected.difference(seen.reaches)  # who has joined says whom it reaches a moment later
    waited_s = min(seen.since_s, seen.quiet_s)
    goes_on = bool(seen.expected.intersection(seen.joins))
    if len(connected) < least:
        return Hold(why=f"{len(connected)} of at least {least} nodes are there")
    if missing and seen.since_s < limits.survivors_s:
        return Hold(why=f"{_titles(sorted(missing), seen)} still stop their workers")
    if seen.doubtful and _members(connected, seen) * 2 < _members(None, seen) and seen.since_s < limits.survivors_s:
        # The others may live behind a cut of the network, and be more than we are: they have as long to stop workers
        # that hang in an exchange with us, and to form the round that goes on.
        return Hold(why=f"{_titles(sorted(seen.doubtful), seen)} fell silent and may be more, where we cannot see them")
    if len(connected) >= limits.most or waited_s >= limits.last_call_s:
        return None
    if seen.waiting.difference(seen.reaches):
        return Hold(why="last call for nodes that wait")
    if not goes_on:
        return Hold(why="last call for nodes that may come")
    if seen.doubtful and _members(connected, seen) * 2 == _members(None, seen):
        return Hold(why=f"{_titles(sorted(seen.doubtful), seen)} fell silent and may live where we cannot see them")
    return None


def in_order(agents: Iterable[Agent], last: Closed | None, survivors: frozenset[str]) -> list[Agent]:
    """Return agents as they are ranked: who goes on comes first, as before; then who is new, as they came."""
    before = [] if last is None else [nonce for nonce in last.nonces if nonce in survivors]
    rank = {nonce: number for number, nonce in enumerate(before)}
    return sorted(agents, key=lambda agent: (rank.get(agent.nonce, len(rank)), agent.created, agent.nonce))


def connected_set(order: Sequence[str], reaches: Mapping[str, Reach]) -> list[str]:
    """Return the largest set, as far as a greedy search finds it, of which all reach each other, in order.

    Of two that are as large, the one that has the earlier nodes. A pair that nobody has tried counts as connected.
    """
    cuts: dict[str, set[str]] = {nonce: set() for nonce in order}
    for one in order:
        for other in cuts.keys() & reaches[one].unreached.keys() - {one}:
            cuts[one].add(other)
            cuts[other].add(one)
    starts = order if len(order) <= _EVERY_START else order[:_SOME_STARTS]
    # One that is cut off from many shuts them out if it is taken before them: once, the best connected come first.
    by_cuts = sorted(order, key=lambda nonce: len(cuts[nonce]))
    best: list[str] = []
    for candidates in [*([start, *order] for start in starts), by_cuts]:
        chosen: set[str] = set()
        for nonce in candidates:
            if cuts[nonce].isdisjoint(chosen):
                chosen.add(nonce)
        if len(chosen) > len(best):
            best = [nonce for nonce in order if nonce in chosen]
        if len(best) == len(order):
            break
    return best


def to_watch(order: Sequence[str], me: str) -> list[str]:
    """Return whom I watch: everybody, or beyond `MESH` nodes my successors in a ring."""
    others = [nonce for nonce in order if nonce != me]
    if len(order) <= MESH or me not in order:
        return others[:MESH]
    after = order.index(me) + 1
    return [order[(after + step) % len(order)] for step in range(_SUCCESSORS)]


def address_for_all(master: Agent, members: Sequence[Agent], reaches: Mapping[str, Reach]) -> tuple[str, bool]:
    """Return the address of ``master`` that all members can use, and whether a more usual one does not work for all."""
    used = [reaches[each.nonce].reached.get(master.nonce, 0) for each in members if each.nonce in reaches]
    last = min(max(used, default=0), len(master.addresses) - 1)
    return master.addresses[last], last > 0


def cut_off(nonce: str, members: Sequence[str], seen: Observed) -> str:
    """Say in words who does not reach whom, of one node and some members."""
    named = _titles([nonce], seen)
    for one in members:
        mine, theirs = seen.reaches.get(nonce), seen.reaches.get(one)
        if mine is not None and one in mine.unreached:
            return f"{named} does not reach {_titles([one], seen)}: {mine.unreached[one]}"
        if theirs is not None and nonce in theirs.unreached:
            return f"{_titles([one], seen)} does not reach {named}: {theirs.unreached[nonce]}"
    return f"{named} is not connected with all of them"


def _reach(one: str, other: str, reaches: Mapping[str, Reach]) -> bool:
    return other not in reaches[one].unreached and one not in reaches[other].unreached


def _untried(alive: Sequence[str], seen: Observed) -> int:
    """Return how many pairs have not been tried that will be; a node that is slow to try does not hold for ever."""
    if seen.quiet_s >= 2 * _TAKEOVER_S:
        return 0
    pairs = [(one, other) for one in alive for other in to_watch(alive, one) if other in alive]
    if len(alive) > MESH:
        pairs = [(one, other) for one, other in pairs if one == seen.me]
    return sum(other not in seen.reaches[one].reached for one, other in pairs if _reach(one, other, seen.reaches))


def _members(connected: Sequence[str] | None, seen: Observed) -> int:
    """Return how many members the last round had, or how many of those are among some nodes."""
    assert seen.last is not None
    members = set(seen.last.nonces)
    return len(members if connected is None else members.intersection(connected))


def _titles(nonces: Iterable[str], seen: Observed) -> str:
    last = {} if seen.last is None else {member.nonce: member for member in seen.last.members}
    known = {**last, **seen.joins}
    return ", ".join(known[nonce].title if nonce in known else nonce for nonce in nonces)
