"""What began it, from what all ranks have left, in whatever order it is read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from resilient.policy.failures.classes import FailureClass
from resilient.policy.failures.verdict import Account, Confidence, Verdict, explain

CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6284."
TIMED_OUT = "RuntimeError: Timed out waiting 8000ms for recv operation to complete"
STORE = "torch.distributed.DistNetworkError: Connection reset by peer"


def said(rank: int, line: str, at_s: float, *, host: str = "a", skew_s: float = 0.0, **more: object) -> Account:
    """Return a rank's own words, or what was seen of its end. Each host has a clock of its own, ``skew_s`` off."""
    boot_s = 1000.0 * (ord(host) - ord("a"))
    base: dict[str, object] = {
        "rank": rank,
        "host": host,
        "lines": (line,),
        "wall_s": 1e9 + at_s + skew_s,
        "monotonic_s": boot_s + at_s,
        "clock": host,
        "own": not line.startswith("process ended"),
        "place": "" if line.startswith("process ended") else "train.py:30",
    }
    return Account(**(base | more))  # type: ignore[arg-type]  # a table of fields


def told(verdict: Verdict) -> tuple[str, int | None]:
    return str(verdict.failure), verdict.rank


def explained(accounts: Sequence[Account], *, expected: int = 4) -> Verdict:
    """Return the verdict, which must not depend on the order in which records are read."""
    verdicts = {explain(order, expected=expected) for order in itertools.permutations(accounts)}
    assert len(verdicts) == 1
    return verdicts.pop()


def test_the_first_failure_is_the_cause_and_broken_connections_follow() -> None:
    verdict = explained(
        [said(0, CLOSED, 1.2), said(1, CLOSED, 1.1), said(2, "KeyError: 'x'", 1.0), said(3, CLOSED, 1.3)]
    )
    assert told(verdict) == ("user-error", 2)
    assert verdict.confidence is Confidence.CERTAIN
    assert verdict.proof == ("rank 2: KeyError: 'x'", "rank 2: at train.py:30")
    assert verdict.follows == (f"ranks 0, 1, 3: {CLOSED}",)


def test_also_where_others_are_quicker_to_write_that_their_connection_broke() -> None:
    verdict = explained([said(0, CLOSED, 0.9), said(2, "KeyError: 'x'", 1.0), said(3, "process ended by SIGTERM", 2)])
    assert told(verdict) == ("user-error", 2)


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("process ended by SIGKILL", "unknown"),
        ("process ended by SIGSEGV", "unknown"),
        ("process ended by SIGBUS", "shared-memory"),
        ("process ended with exit code 7", "user-error"),
    ],
)
def test_a_rank_that_could_say_nothing_is_named_by_what_was_seen(line: str, failure: str) -> None:
    verdict = explained([said(1, line, 1.0), said(0, CLOSED, 1.1), said(2, CLOSED, 1.1), said(3, CLOSED, 1.2)])
    assert told(verdict) == (failure, 1)


def test_a_rank_that_left_nothing_at_all_is_the_suspect() -> None:
    verdict = explained([said(0, CLOSED, 1.1), said(2, CLOSED, 1.1), said(3, CLOSED, 1.2)])
    assert told(verdict) == ("unknown", 1)
    assert verdict.confidence is Confidence.LIKELY
    assert verdict.proof[0] == "rank 1: no record"


def test_memory_that_ran_out_on_its_node_says_why_it_was_killed_and_not_that_of_another_node() -> None:
    killed = said(1, "process ended by SIGKILL", 1.0)
    assert told(explained([killed, said(0, CLOSED, 1.1, oom=True)], expected=2)) == ("host-oom", 1)
    assert told(explained([killed, said(0, CLOSED, 1.1, oom=True, host="b")], expected=2)) == ("unknown", 1)


def test_a_whole_node_that_left_nothing_is_lost() -> None:
    there = [said(rank, CLOSED, 1.0, host="a", first_rank=0, local_ranks=2) for rank in (0, 1)]
    verdict = explained(there)
    assert (verdict.failure, verdict.rank, verdict.node) == (FailureClass.NODE_LOST, 2, None)


def test_what_an_agent_does_to_the_others_is_no_cause() -> None:
    ended = [said(rank, "process ended by SIGTERM", 1.0 + rank) for rank in (0, 1, 3)]
    assert told(explained([*ended, said(2, "ValueError: x", 0.9)])) == ("user-error", 2)
    assert told(explained([*ended, said(2, "process ended with exit code 143", 5.0)])) == ("unknown", None)


def test_a_rank_that_is_killed_long_after_others_noticed_is_none_either() -> None:
    late = said(3, "process ended by SIGKILL", 31.0)
    lost = [said(rank, STORE, 1.0 + rank / 10) for rank in (0, 1, 2)]
    verdict = explained([late, *lost])
    assert told(verdict) == ("coordinator-lost", None)
    assert told(explained([said(3, "process ended by SIGKILL", 1.0), *lost])) == ("unknown", 3)


def test_when_nobody_failed_and_nobody_is_missing() -> None:
    for line, failure in ((CLOSED, "network"), (TIMED_OUT, "hang"), (STORE, "coordinator-lost")):
        verdict = explained([said(rank, line, 1.0) for rank in range(4)])
        assert told(verdict) == (failure, None)


def test_of_those_that_waited_in_vain_the_one_that_was_elsewhere_is_named() -> None:
    lines = [said(rank, TIMED_OUT, 1.0, place="train.py:40" if rank == 2 else "train.py:30") for rank in range(4)]
    assert told(explained(lines)) == ("hang", 2)


def test_a_collective_entered_with_other_tensors_is_the_strays_fault_not_that_of_the_rank_it_aborted() -> None:
    aborted = said(1, "process ended by SIGABRT", 1.0)
    stray = said(2, CLOSED, 1.1, place="train.py:40")
    verdict = explained([aborted, stray, said(0, CLOSED, 1.1), said(3, CLOSED, 1.2)])
    assert told(verdict) == ("user-error", 2)
    assert "out of step" in verdict.why
    there = said(3, "it lived when rank 1 ended", 1.05, bystander=True)
    assert told(explained([aborted, stray, said(0, CLOSED, 1.1), there])) == ("user-error", 2)
    assert told(explained([aborted, stray, said(0, CLOSED, 1.1)])) == ("unknown", 1), "two against one is no majority"


def test_own_words_count_more_than_that_a_rank_had_lived_and_that_more_than_how_it_ended() -> None:
    lived = said(0, "it lived when rank 1 ended", 1.0, bystander=True)
    ended = said(0, "process ended by SIGKILL", 31.0)
    own = said(0, "KeyError: 'x'", 0.5)
    killed = said(1, "process ended by SIGSEGV", 0.9)
    assert told(explained([lived, ended, killed], expected=2)) == ("unknown", 1)
    assert told(explained([lived, own, killed], expected=2)) == ("user-error", 0)


def test_one_nodes_clock_orders_exactly_however_wrong_it_is() -> None:
    for skew_s in (-3600.0, 0.0, 3600.0):
        first = said(1, "KeyError: 'x'", 1.000, skew_s=skew_s)
        second = said(0, "IndexError: y", 1.001, skew_s=skew_s)
        assert told(explained([first, second], expected=2)) == ("user-error", 1)


def test_between_nodes_what_leaves_no_doubt_goes_first_within_the_doubt_of_their_clocks() -> None:
    fell = said(
        1, "process ended by SIGABRT", 1.3, host="b", context=("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen",)
    )
    crashed = said(0, "process ended by SIGSEGV", 1.0)
    verdict = explained([crashed, fell], expected=2)
    assert (told(verdict), verdict.node) == (("device-hardware", 1), "b")
    assert verdict.confidence is Confidence.LIKELY
    assert "clocks" in verdict.why
    later = said(1, "process ended by SIGABRT", 9.0, host="b", context=fell.context)
    assert told(explained([crashed, later], expected=2)) == ("unknown", 0)


def test_ranks_beyond_those_that_must_write_are_not_missing() -> None:
    some = [said(rank, CLOSED, 1.0) for rank in range(4)]
    assert told(explained([*some, said(300, "ValueError: x", 0.9)], expected=4)) == ("user-error", 300)


def test_no_word_at_all_is_unknown() -> None:
    assert told(explained([], expected=4)) == ("unknown", None)


def test_fingerprints_do_not_depend_on_numbers_and_ranks() -> None:
    one = explain([said(1, "ValueError: sample 17 at 0x7f00", 1.0)], expected=1)
    other = explain([said(3, "ValueError: sample 4 at 0x7fff", 9.0)], expected=1)
    assert (
        one.fingerprint == other.fingerprint != explain([said(1, "ValueError: label 4", 1.0)], expected=1).fingerprint
    )


def test_any_single_cause_is_found_among_any_survivors() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(300):
        size, begun_s = dice.randint(2, 64), dice.uniform(0, 100)
        bad = dice.randrange(size)
        line = dice.choice(["KeyError: 'x'", "process ended by SIGKILL", "process ended by SIGSEGV", "SystemExit: 3"])
        others = [
            said(rank, dice.choice([CLOSED, TIMED_OUT, "process ended by SIGTERM"]), begun_s + dice.uniform(0.001, 4))
            for rank in range(size)
            if rank != bad and dice.random() < 0.9
        ]
        records = [said(bad, line, begun_s), *others]
        dice.shuffle(records)
        assert explain(records, expected=size).rank == bad
