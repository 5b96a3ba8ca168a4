"""What the tests of nodes in pairs say of each node, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from resilient.check.limits import GIB, Limits
from resilient.check.pairs import Blame, Trial, judge, usual
from resilient.check.result import Result, Status, failed

ALL_REDUCE: Final = "all-reduce in pairs"
CLOCK: Final = "clock against others"

_TAKE_OUT: Final = "take this node out; `resilient check --level full` on it alone may say what is wrong"
_LINK: Final = "look at its network links, cables and switch port; compare the paths of the two nodes"


def results_of(titles: Sequence[str], tests: Sequence[Trial], limits: Limits) -> dict[int, list[Result]]:
    """Return, for each node that was tested, what its tests say."""
    verdict = judge(tests, limits)
    nodes = sorted({node for test in tests for node in test.pair})
    found: dict[int, list[Result]] = {}
    for node in nodes:
        own = [test for test in tests if node in test.pair]
        results = _failing(node, own, verdict.failing, titles)
        if not results:
            results = _slow(node, own, verdict.slow, verdict.exchange, tests, limits, titles)
        if not results:
            results = [_well(own, titles, node)]
        found[node] = [*results, *_clock(node, own, verdict.clock, limits, titles)]
    return found


def _failing(node: int, own: Sequence[Trial], found: Blame, titles: Sequence[str]) -> list[Result]:
    bad = [test for test in own if test.failed]
    if any(test.outcomes[test.pair.index(node)] is None for test in own):
        line = f"has fallen silent in the test with {_partner(node, bad[-1], titles)}"
        return [failed(ALL_REDUCE, line, "look whether this node lives, and reaches the address of node 0")]
    if node in found.certain:
        partners = " and ".join(dict.fromkeys(_partner(node, test, titles) for test in bad))
        line = f"fails with {partners}, which do well with others: {_why(bad)}"
        return [failed(ALL_REDUCE, line, _TAKE_OUT)]
    if node in found.undecided:
        return [
            failed(
                ALL_REDUCE, f"fails with {_partner(node, bad[0], titles)}: {_why(bad)}", _undecided(bad, node, titles)
            )
        ]
    if all(test.failed for test in own):
        line = f"was only tested with nodes that fail ({_partner(node, bad[0], titles)})"
        return [Result(name=ALL_REDUCE, status=Status.SKIPPED, line=line)]
    return []


def _slow(
    node: int,
    own: Sequence[Trial],
    whole: Blame,
    exchange: Blame,
    tests: Sequence[Trial],
    limits: Limits,
    titles: Sequence[str],
) -> list[Result]:
    passed = [test for test in own if not test.failed]
    for blamed, what, measure, remedy in (
        (exchange, "exchanges", lambda test: test.exchange_s, _LINK),
        (whole, "computes and exchanges", lambda test: test.seconds, _TAKE_OUT),
    ):
        if node in blamed.certain | blamed.undecided:
            ratio = min(map(measure, passed)) / usual(tests, measure)
            sure = node in blamed.certain
            line = f"{what} {ratio:.1f} times slower than the median node"
            return [
                Result(
                    name=ALL_REDUCE,
                    status=Status.SLOW,
                    line=line if sure else f"{line}, or its partner does",
                    remedy=remedy if sure else _undecided(passed, node, titles),
                    figure=ratio,
                    unit="x",
                    limit=limits.pair_ratio,
                )
            ]
    return []


def _well(own: Sequence[Trial], titles: Sequence[str], node: int) -> Result:
    passed = [test for test in own if not test.failed]
    partners = ", ".join(dict.fromkeys(_partner(node, test, titles) for test in passed))
    return Result(
        name=ALL_REDUCE,
        status=Status.OK,
        line=f"right sums with {partners}",
        figure=max(test.rate for test in passed) / GIB,
        unit="GiB/s",
    )


def _clock(node: int, own: Sequence[Trial], found: Blame, limits: Limits, titles: Sequence[str]) -> list[Result]:
    passed = [test for test in own if not test.failed]
    if not passed:
        return []
    offset_s, doubt_s, partner = min((_offset(node, test, titles) for test in passed), key=lambda each: abs(each[0]))
    result = Result(
        name=CLOCK,
        status=Status.OK,
        line=f"within {limits.clock_s * 1e3:g} ms of others (measured to {doubt_s * 1e3:.2f} ms)",
        figure=abs(offset_s) * 1e3,
        unit="ms",
        limit=limits.clock_s * 1e3,
    )
    if node not in found.certain | found.undecided:
        return [result]
    side = "behind" if offset_s > 0 else "ahead of"
    line = f"is {abs(offset_s) * 1e3:.1f} ms {side} {partner}'s (measured to {doubt_s * 1e3:.2f} ms)"
    remedy = "start chrony or systemd-timesyncd on it, with the time server of the others"
    if node in found.undecided:
        remedy += "; it may be the other one that is off"
    return [msgspec.structs.replace(result, status=Status.FAILED, line=line, remedy=remedy)]


def _offset(node: int, test: Trial, titles: Sequence[str]) -> tuple[float, float, str]:
    outcome = test.outcomes[test.pair.index(node)]
    assert outcome is not None  # a test that went well has both
    return outcome.offset_s, outcome.doubt_s, _partner(node, test, titles)


def _partner(node: int, test: Trial, titles: Sequence[str]) -> str:
    return titles[test.pair[1] if test.pair[0] == node else test.pair[0]]


def _why(bad: Sequence[Trial]) -> str:
    """Return the reason that says most: of a wrong sum or an end rather than of a lost connection."""
    reasons = [outcome.why for test in bad for outcome in test.outcomes if outcome is not None and outcome.why]
    reasons += ["no word from it" for test in bad if None in test.outcomes]
    return min(reasons, key=lambda why: ("sums were wrong" not in why, "process ended" not in why, "Error" in why))


def _undecided(tests: Sequence[Trial], node: int, titles: Sequence[str]) -> str:
    partner = _partner(node, tests[0], titles)
    return f"it may be {partner} that is bad: check again with a third node that is well, or each alone"
