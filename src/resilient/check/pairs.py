"""Which nodes are tested with which, and which of them that accuses.

The idea is DLRover's node check: nodes compute and all-reduce in pairs, twice, and the second time those of a bad or
slow pair get good partners; the bad node is bad twice, its first partner only once. Here:

- an odd node out is tested after its round, with a node of a good pair;
- a node that shared its bad test with another suspect in both rounds is tested once more;
- a time is that of the slower of two, so that a node's least time over its tests is a bound of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from resilient.check.limits import Limits

Pair = tuple[int, int]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of one test with another.

    ``why`` is empty if all went well. ``seconds``: the shortest turn of computing and exchanging; ``exchange_s``: the
    shortest exchange alone, of ``nbytes``. ``offset_s``: by how much the partner's clock is ahead, give or take
    ``doubt_s`` (half the round trip).
    """

    why: str = ""
    seconds: float = 0.0
    exchange_s: float = 0.0
    nbytes: int = 0
    offset_s: float = 0.0
    doubt_s: float = 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One test of two nodes, with the outcome of each; None where one has said nothing in time."""

    pair: Pair
    outcomes: tuple[Outcome | None, Outcome | None]

    @property
    def failed(self) -> bool:
        return any(outcome is None or outcome.why for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        return max(outcome.seconds for outcome in self.outcomes if outcome is not None)

    @property
    def exchange_s(self) -> float:
        return max(outcome.exchange_s for outcome in self.outcomes if outcome is not None)

    @property
    def rate(self) -> float:
        """Bytes a second that went each way: of two nodes, an all-reduce sends the whole of it."""
        outcome = next(outcome for outcome in self.outcomes if outcome is not None)
        return outcome.nbytes / self.exchange_s

    def apart(self, limit_s: float) -> bool:
        """Whether the clocks are surely apart by more than a limit."""
        return any(each is not None and abs(each.offset_s) - each.doubt_s > limit_s for each in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """``certain`` nodes are bad. Of ``undecided`` ones some are: nobody good was there to tell which."""

    certain: frozenset[int]
    undecided: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who fails, who computes or exchanges slowly, whose clock is off."""

    failing: Blame
    slow: Blame
    exchange: Blame
    clock: Blame


def blame(tests: Iterable[tuple[Pair, bool]], known: Collection[int] = ()) -> Blame:
    """Return who is bad, of tests with "is bad": one good test acquits both; a bad one with an acquitted convicts.

    ``known`` are bad for another reason.
    """
    bad, good = _by_node(tests)
    accused = set(bad) - good
    certain = frozenset(node for node in accused if bad[node] & good) | frozenset(known)
    return Blame(certain=certain, undecided=frozenset(accused - certain - _explained(bad, accused, certain)))


def _by_node(tests: Iterable[tuple[Pair, bool]]) -> tuple[dict[int, set[int]], set[int]]:
    """Return each node's partners in bad tests, and the nodes of good ones."""
    bad: dict[int, set[int]] = {}
    good: set[int] = set()
    for (one, other), is_bad in tests:
        if is_bad:
            bad.setdefault(one, set()).add(other)
            bad.setdefault(other, set()).add(one)
        else:
            good |= {one, other}
    return bad, good


def _explained(bad: dict[int, set[int]], accused: set[int], certain: Collection[int]) -> set[int]:
    """Return the accused whose every bad test was with one that is certainly bad: nothing speaks against them."""
    return {node for node in accused if node not in certain and bad[node] <= set(certain)}


def first(nodes: Sequence[int]) -> list[Pair]:
    """Return the pairs of the first round: neighbours; an odd one is left."""
    return list(zip(nodes[::2], nodes[1::2], strict=False))


def odd(nodes: Sequence[int], tests: Sequence[Trial], limits: Limits) -> list[Pair]:
    """Return the pair in which an odd node is tested after the first round: with one that has done well, if any."""
    if len(nodes) % 2 == 0 or len(nodes) < 3:
        return []
    suspects = suspected(tests, limits)
    return [(next((node for node in nodes[:-1] if node not in suspects), nodes[0]), nodes[-1])]


def silent(tests: Sequence[Trial]) -> set[int]:
    """Return the nodes that have not reported a test.

    A test runs in a process of its own, which is ended if it hangs: a node whose own process lives always reports.
    """
    return {node for test in tests for node, said in zip(test.pair, test.outcomes, strict=True) if said is None}


def suspected(tests: Sequence[Trial], limits: Limits) -> set[int]:
    """Return the nodes of tests that failed, were slow, or showed clocks apart."""
    kinds = _kinds(tests, limits)
    return {node for test in tests if any(kind(test) for kind in kinds) for node in test.pair}


def second(nodes: Sequence[int], tests: Sequence[Trial], limits: Limits) -> list[list[Pair]]:
    """Return the pairs of the second round, in waves: each suspect with a node that has done well, slow with fast.

    If nobody has done well, suspects change partners among themselves.
    """
    suspects = suspected(tests, limits)
    known = {frozenset(test.pair) for test in tests}
    slowness = {node: test.seconds for test in tests if not test.failed for node in test.pair}
    by_speed = sorted(nodes, key=lambda node: slowness.get(node, float("inf")))
    good = [node for node in by_speed if node not in suspects]
    bad = [node for node in reversed(by_speed) if node in suspects]
    if not good:
        return [_others(bad, known)]
    waves: list[list[Pair]] = []
    while bad:
        now, bad = bad[: len(good)], bad[len(good) :]
        waves.append(_matched(now, good, known))
    if not waves:
        waves.append([])
    used = {node for pair in waves[0] for node in pair}
    waves[0] += _others([node for node in good if node not in used], known)
    return waves


def _matched(suspects: Sequence[int], good: Sequence[int], known: Collection[frozenset[int]]) -> list[Pair]:
    """Pair each suspect with a good node, one that it has not met if there is one."""
    free, pairs = list(good), []
    for node in suspects:
        partner = next((each for each in free if frozenset((node, each)) not in known), free[0])
        free.remove(partner)
        pairs.append((node, partner))
    return pairs


def _others(nodes: Sequence[int], known: Collection[frozenset[int]]) -> list[Pair]:
    """Pair each node with the one farthest in speed that it has not met; one may be left, that has met all."""
    left, pairs = list(nodes), []
    while len(left) > 1:
        unmet = ((one, other) for one in left for other in reversed(left) if frozenset((one, other)) not in known)
        pair = next((pair for pair in unmet if pair[0] != pair[1]), (left[0], left[-1]))
        left = [node for node in left if node not in pair]
        pairs.append(pair)
    return pairs


def decisive(nodes: Sequence[int], tests: Sequence[Trial], limits: Limits) -> list[Pair]:
    """Return one more wave, of pairs that have not met: nodes with only one good test, and those that nothing decides.

    Of two faults in different pairs of four nodes, the good halves have met no good node yet: this lets them meet.
    """
    found = judge(tests, limits)
    faults = (found.failing, found.slow, found.exchange, found.clock)
    if not any(each.certain or each.undecided for each in faults):
        return []
    kinds, undecided = _kinds(tests, limits), frozenset[int]().union(*(each.undecided for each in faults))
    well = Counter(node for test in tests if not any(kind(test) for kind in kinds) for node in test.pair)
    free = [node for node in nodes if node not in found.failing.certain]
    wanted = [node for node in free if node in undecided or well[node] < 2]
    known = {frozenset(test.pair) for test in tests}
    pairs: list[Pair] = []
    for node in wanted:
        partners = (each for each in (*wanted, *free) if each in free and each != node)
        partner = next((each for each in partners if frozenset((node, each)) not in known), None)
        if node in free and partner is not None:
            free = [each for each in free if each not in {node, partner}]
            pairs.append((node, partner))
    return pairs


def judge(tests: Sequence[Trial], limits: Limits) -> Verdict:
    """Return what the tests say of the nodes."""
    failed, slow, exchange, apart = _kinds(tests, limits)
    passed = [test for test in tests if not test.failed]
    failing = blame(((test.pair, failed(test)) for test in tests), silent(tests))
    return Verdict(
        failing=failing,
        slow=blame((test.pair, slow(test)) for test in passed),
        exchange=blame((test.pair, exchange(test)) for test in passed),
        clock=blame((test.pair, apart(test)) for test in passed),
    )


def _kinds(tests: Sequence[Trial], limits: Limits) -> tuple[Callable[[Trial], bool], ...]:
    """Return what makes a test bad: it failed, was slow as a whole or in its exchange, showed clocks apart."""
    usual_s, usual_exchange_s = usual(tests, lambda test: test.seconds), usual(tests, lambda test: test.exchange_s)
    return (
        lambda test: test.failed,
        lambda test: not test.failed and test.seconds > limits.pair_ratio * usual_s,
        lambda test: not test.failed and test.exchange_s > limits.pair_ratio * usual_exchange_s,
        lambda test: not test.failed and test.apart(limits.clock_s),
    )


def usual(tests: Sequence[Trial], seconds: Callable[[Trial], float]) -> float:
    """Return the (lower) median over nodes of each one's least time; infinite if no test went well."""
    least: dict[int, float] = {}
    for test in tests:
        for node in test.pair if not test.failed else ():
            least[node] = min(least.get(node, float("inf")), seconds(test))
    return statistics.median_low(least.values()) if least else float("inf")
