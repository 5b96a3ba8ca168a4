"""Who is blamed: every place of a slow and of a failing node, and what cannot be told apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from resilient.check import pairs
from resilient.check.limits import Limits
from resilient.check.pair_report import ALL_REDUCE, CLOCK, results_of
from resilient.check.pairs import Blame, Outcome, Pair, Trial, Verdict
from resilient.check.result import Status

LIMITS = Limits()


class Nodes:
    """Nodes as they are: how slow, which fail, by how many seconds whose clock is ahead."""

    def __init__(
        self,
        count: int,
        *,
        slow: Mapping[int, float] | None = None,
        failing: set[int] | None = None,
        ahead: Mapping[int, float] | None = None,
    ) -> None:
        self.all = list(range(count))
        self.slow, self.failing, self.ahead = dict(slow or {}), failing or set(), dict(ahead or {})
        self.tests: list[Trial] = []

    def test(self, wave: list[Pair]) -> None:
        met = [node for pair in wave for node in pair]
        assert len(met) == len(set(met)), f"a node has two partners at once: {wave}"
        assert all(a != b for a, b in wave)
        self.tests += [Trial(pair=pair, outcomes=(self._saw(pair), self._saw(pair[::-1]))) for pair in wave]

    def _saw(self, pair: Pair) -> Outcome:
        node, partner = pair
        if self.failing & {node, partner}:
            return Outcome(why="3 of 3 sums were wrong")
        # Healthy nodes differ a little, as they do in life.
        seconds = max(self.slow.get(each, 1.0) * (1 + 0.02 * each) for each in pair)
        offset_s = self.ahead.get(partner, 0.0) - self.ahead.get(node, 0.0)
        return Outcome(seconds=seconds, exchange_s=seconds / 2, nbytes=1 << 20, offset_s=offset_s, doubt_s=1e-4)

    def check(self) -> Verdict:
        """Trial as node 0 does, in the same order; return the verdict."""
        self.test(pairs.first(self.all))
        self.test(pairs.odd(self.all, self.tests, LIMITS))
        for wave in pairs.second(self.all, self.tests, LIMITS):
            self.test(wave)
        for _ in range(2):
            self.test(pairs.decisive(self.all, self.tests, LIMITS))
        return pairs.judge(self.tests, LIMITS)


def only(*nodes: int) -> Blame:
    """Return that these are bad, for sure, and nobody else."""
    return Blame(certain=frozenset(nodes), undecided=frozenset())


@pytest.mark.parametrize("count", range(2, 10))
def test_healthy_nodes_are_tested_twice_and_blamed_for_nothing(count: int) -> None:
    nodes = Nodes(count)
    verdict = nodes.check()
    assert not any(blame.certain | blame.undecided for blame in (verdict.failing, verdict.slow, verdict.exchange))
    tested = [sum(node in test.pair for test in nodes.tests) for node in nodes.all]
    assert min(tested) >= (2 if count % 2 == 0 else 1)
    assert len(nodes.tests) <= count + 1


@pytest.mark.parametrize("count", range(3, 10))
def test_one_slow_or_one_failing_node_is_named_wherever_it_is(count: int) -> None:
    for bad in range(count):
        slow = Nodes(count, slow={bad: 3.0}).check()
        assert slow.slow == slow.exchange == only(bad), (count, bad)
        failing = Nodes(count, failing={bad}).check()
        assert failing.failing == only(bad), (count, bad)
        off = Nodes(count, ahead={bad: 0.005_2}).check()
        assert off.clock == only(bad), (count, bad)


@pytest.mark.parametrize("count", range(4, 10))
def test_a_slow_and_a_failing_node_are_both_named_wherever_they_are(count: int) -> None:
    for slow, failing in itertools.permutations(range(count), 2):
        verdict = Nodes(count, slow={slow: 3.0}, failing={failing}).check()
        assert (verdict.failing, verdict.slow) == (only(failing), only(slow)), (count, slow, failing)


@pytest.mark.parametrize("count", range(6, 10))
def test_two_failing_nodes_are_both_named_wherever_they_are(count: int) -> None:
    for bad in itertools.combinations(range(count), 2):
        verdict = Nodes(count, failing=set(bad)).check()
        assert verdict.failing == only(*bad), (count, bad)


def test_of_two_nodes_it_is_said_that_nothing_tells_which() -> None:
    nodes = Nodes(2, failing={1})
    assert nodes.check().failing.undecided == {0, 1}
    (result,) = results_of(["a", "b"], nodes.tests, LIMITS)[0]
    assert result.status is Status.FAILED
    assert "it may be b that is bad" in result.remedy


def test_a_node_that_says_nothing_more_is_the_one_that_fails() -> None:
    well = Outcome(seconds=1.0, exchange_s=0.5, nbytes=1 << 20)
    lost = Outcome(why="RuntimeError: Connection closed by peer")
    tests = [
        Trial(pair=(0, 1), outcomes=(lost, None)),
        Trial(pair=(2, 3), outcomes=(well, well)),
        Trial(pair=(0, 3), outcomes=(well, well)),
    ]
    found = results_of(["a", "b", "c", "d"], tests, LIMITS)
    assert [found[node][0].status for node in range(4)] == ["ok", "failed", "ok", "ok"]
    assert found[1][0].line == "has fallen silent in the test with a"
    assert pairs.silent(tests) == {1}


def test_a_slow_link_is_told_from_a_slow_node() -> None:
    """Only the exchange of node 2 is slow: it computes like the others."""

    def saw(pair: Pair) -> Outcome:
        return Outcome(seconds=1.5 if 2 in pair else 1.0, exchange_s=0.6 if 2 in pair else 0.1, nbytes=1 << 20)

    tests = [Trial(pair=pair, outcomes=(saw(pair),) * 2) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))]
    found = results_of(list("abcd"), tests, LIMITS)
    assert [found[node][0].status for node in range(4)] == ["ok", "ok", "slow", "ok"]
    assert found[2][0].line == "exchanges 6.0 times slower than the median node"
    assert "network links" in found[2][0].remedy


def test_a_clock_is_off_only_beyond_doubt() -> None:
    for offset_s, doubt_s, status in ((0.005_5, 0.000_2, "failed"), (0.005_5, 0.001, "ok"), (0.004, 0.0, "ok")):
        here = Outcome(seconds=1.0, exchange_s=0.5, nbytes=1 << 20)
        apart = [
            Outcome(seconds=1.0, exchange_s=0.5, nbytes=1 << 20, offset_s=sign * offset_s, doubt_s=doubt_s)
            for sign in (1, -1)
        ]
        tests = [
            Trial(pair=(0, 1), outcomes=(apart[0], apart[1])),
            Trial(pair=(0, 2), outcomes=(here, here)),
            Trial(pair=(1, 2), outcomes=(apart[1], apart[0])),
        ]
        found = {node: each[-1] for node, each in results_of(list("abc"), tests, LIMITS).items()}
        assert {each.name for each in found.values()} == {CLOCK}
        assert (found[1].status, found[0].status) == (status, "ok"), (offset_s, doubt_s)
        if status == "failed":
            assert found[1].line == "is 5.5 ms ahead of a's (measured to 0.20 ms)"


def test_lines_name_partners_and_rates() -> None:
    nodes = Nodes(4)
    nodes.check()
    found = results_of(list("abcd"), nodes.tests, LIMITS)
    assert found[0][0].name == ALL_REDUCE
    assert found[0][0].line.startswith("right sums with b, ")
    assert found[0][0].unit == "GiB/s"
