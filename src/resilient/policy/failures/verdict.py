"""What began: a verdict from what all ranks of a generation have left, in whatever order that arrived."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from resilient.policy.failures.classes import FailureClass
from resilient.policy.failures.reading import Reading, read
from resilient.policy.failures.rules import RULES, Role, Rule

_CLOCK_DOUBT_S: Final = 1.0
"""By so much the wall clocks of two nodes may differ, as long as nobody has measured it."""

_LATE_S: Final = 5.0
"""A process that ends so long after others had noticed something was ended because of it (torchelastic: 30 s)."""

_SHOWN: Final = 8
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|[-+]?\d+(?:[._:]\d+)*(?:e[-+]?\d+)?")
_ENDED: Final = "process ended by SIG"


class Confidence(StrEnum):
    """How far a verdict can be relied on. Of "unknown" it says how far the rank can be."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a rank has left of its failure; or, if not ``own``, what another process has seen of its end.

    ``lines`` are its own words, ``context`` what was around (stderr, the kernel). ``monotonic_s`` can be compared where
    ``clock`` is the same; ``wall_s`` everywhere, with a doubt. ``bystander``: it lived when another one ended.
    ``place``: the innermost line of the user's own code. ``oom``: the kernel has killed for want of memory on this node
    meanwhile. ``first_rank`` and ``local_ranks``: which ranks this node has.
    """

    rank: int
    host: str
    lines: tuple[str, ...]
    wall_s: float
    monotonic_s: float
    clock: str
    context: tuple[str, ...] = ()
    own: bool = True
    bystander: bool = False
    place: str = ""
    oom: bool = False
    step: int | None = None
    first_rank: int | None = None
    local_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What began a failure, as far as it can be told.

    ``rank`` and ``node`` are where; None where that is not known, or where it was no single rank. ``proof``: the lines
    that say so. ``follows``: what other ranks said then, which is no cause.
    """

    failure: FailureClass
    confidence: Confidence
    why: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    proof: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What is the same when the same failure comes again: the first proof, without numbers and addresses."""
        said = self.proof[0].partition(": ")[2] if self.proof else self.why
        return f"{self.failure} {_VARYING.sub('#', said)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """A rank's account, what it says, and when, on one time line."""

    said: Account
    reading: Reading
    at_s: float

    @property
    def proof(self) -> str:
        return f"rank {self.said.rank}: {self.reading.line}"


def explain(accounts: Sequence[Account], *, expected: int, rules: Sequence[Rule] = RULES) -> Verdict:
    """Return what began the failure of one generation.

    Args:
        accounts: all of them, in any order.
        expected: ranks below this number leave a account whatever they fail by; one that has left none was ended
            without a chance to.
        rules: by which lines are read; `RULES`, after those of a user.
    """
    findings = _on_one_line(
        [_Finding(said=each, reading=reading_of(each, rules), at_s=0.0) for each in _one_each(accounts)]
    )
    if not findings:
        why = "no rank has left a word: all were ended at once, or before they had begun"
        return Verdict(failure=FailureClass.UNKNOWN, confidence=Confidence.POSSIBLE, why=why)
    roots = _roots(findings)
    if roots:
        return _with_root(roots[0], roots, findings)
    silent = sorted(set(range(expected)) - {each.said.rank for each in findings})
    return _without_word(silent, findings) if silent else _nobody(findings)


def _one_each(accounts: Sequence[Account]) -> list[Account]:
    """Take each rank's words of its failure, else that it lived when another ended, else what was seen of its end."""
    chosen: dict[int, Account] = {}
    for each in sorted(accounts, key=lambda each: (not each.own, each.bystander, each.monotonic_s)):
        chosen.setdefault(each.rank, each)
    out_of_memory = {each.host for each in accounts if each.oom}
    return [replace(each, oom=each.oom or each.host in out_of_memory) for each in chosen.values()]


def reading_of(said: Account, rules: Sequence[Rule] = RULES) -> Reading:
    """Return what one account says by itself: what was around it speaks where its own words leave a doubt."""
    reading = read(said.lines, rules)
    if reading is None:
        # An exception that no rule knows: it is the program's if its code was on the stack.
        failure = FailureClass.USER_ERROR if said.place else FailureClass.UNKNOWN
        line = said.lines[0] if said.lines else ""
        reading = Reading(failure=failure, role=Role.ROOT, line=line, sure=False)
    # An exit code alone says next to nothing.
    unknown = reading.failure is FailureClass.UNKNOWN or reading.line.startswith("process ended with exit code")
    if unknown or not reading.sure:
        around = read([*said.context, *_memory(said, reading)], rules)
        if around is not None and (_speaks(around, unknown=unknown) or _is_aborted(reading, around)):
            reading = around
    return reading


def _speaks(around: Reading, *, unknown: bool) -> bool:
    return around.role is Role.ROOT and (around.sure or unknown)


def _is_aborted(reading: Reading, around: Reading) -> bool:
    """Say whether a process has ended itself because of another rank, as a watchdog of NCCL does."""
    return around.role is Role.SECONDARY and reading.line.startswith(f"{_ENDED}ABRT")


def _memory(said: Account, reading: Reading) -> list[str]:
    """A counter of the kernel belongs to a process that was killed, not to one that noticed it."""
    killed = "SIGKILL" in reading.line or "DataLoader worker" in reading.line
    return [f"kernel: oom_kill counter of {said.host} has risen"] if said.oom and killed else []


def _on_one_line(findings: Sequence[_Finding]) -> list[_Finding]:
    """Order by time: exactly on one node, by its wall clock between nodes."""
    begin: dict[str, float] = {}
    for each in findings:
        offset_s = each.said.wall_s - each.said.monotonic_s
        begin[each.said.clock] = min(offset_s, begin.get(each.said.clock, offset_s))
    placed = [replace(each, at_s=each.said.monotonic_s + begin[each.said.clock]) for each in findings]
    return sorted(placed, key=lambda each: (each.at_s, each.said.rank))


def _roots(findings: Sequence[_Finding]) -> list[_Finding]:
    """Return what may have begun it, in order; not a process that was ended after others had noticed something."""
    noticed_s = min((each.at_s for each in findings if each.said.own), default=float("inf"))
    return [
        each
        for each in findings
        if each.reading.role is Role.ROOT and (each.said.own or each.at_s <= noticed_s + _LATE_S)
    ]


def _with_root(first: _Finding, roots: Sequence[_Finding], findings: Sequence[_Finding]) -> Verdict:
    near = [each for each in roots if _together(first, each)]
    # Between nodes the clocks do not tell which was first: what leaves no doubt about itself goes before what does.
    chosen = min(near, key=lambda each: (not _plain(each), each.at_s))
    stray = _astray(findings) if chosen.reading.line.startswith(f"{_ENDED}ABRT") else None
    if stray is not None:
        return _out_of_step(stray, chosen, findings)
    doubtful = len(near) > 1
    confidence = Confidence.CERTAIN if chosen.reading.sure and not doubtful else Confidence.LIKELY
    alike = [each for each in roots if each.reading.failure is chosen.reading.failure and each is not chosen]
    why = (
        f"rank {chosen.said.rank} was the first to fail" if len(findings) > 1 else "it is the only one that has failed"
    )
    if alike:
        why += f"; {_ranks([each.said.rank for each in alike])} failed in the same way"
    if doubtful:
        why += "; another node's failure is so near that their clocks do not tell which was first"
    return _verdict(chosen, confidence, why, proof=[chosen, *alike], findings=findings)


def _together(first: _Finding, other: _Finding) -> bool:
    if other is first:
        return True
    return other.said.clock != first.said.clock and other.at_s - first.at_s <= _CLOCK_DOUBT_S


def _plain(finding: _Finding) -> bool:
    return finding.reading.sure and finding.reading.failure is not FailureClass.UNKNOWN


def _out_of_step(stray: _Finding, aborted: _Finding, findings: Sequence[_Finding]) -> Verdict:
    """A collective that ranks enter with different tensors aborts one of them, not always the one that strayed."""
    verdict = _verdict(
        stray,
        Confidence.LIKELY,
        f"rank {stray.said.rank} was at {stray.said.place}, all others elsewhere, in a collective that aborted "
        f"rank {aborted.said.rank}: the ranks were out of step",
        proof=[aborted, stray],
        findings=findings,
    )
    return replace(verdict, failure=FailureClass.USER_ERROR)


def _astray(findings: Sequence[_Finding]) -> _Finding | None:
    """Return the one rank that was at another line of the program than all others that tell where they were."""
    placed = [each for each in findings if each.said.place and each.reading.role is Role.SECONDARY]
    places = Counter(each.said.place for each in placed)
    if len(places) != 2 or len(placed) < 3:
        return None
    (_, most), (rare, least) = places.most_common()
    return next(each for each in placed if each.said.place == rare) if least == 1 < most else None


def _without_word(silent: Sequence[int], findings: Sequence[_Finding]) -> Verdict:
    """Others have noticed that somebody is gone, and these have left nothing: they were ended by force."""
    nodes = {each.said.host: _local(each.said) for each in findings}
    host = next((host for host, local in nodes.items() if set(silent) <= set(local)), None)
    killed = host is not None and any(each.said.oom for each in findings if each.said.host == host)
    # On the nodes of the others some may only have had no time to say anything.
    known = {rank for local in nodes.values() for rank in local}
    elsewhere = [rank for rank in silent if rank not in known]
    whole = len(elsewhere) > 1 and _is_one_node(elsewhere, nodes)
    silent = elsewhere if whole else silent
    failure = FailureClass.HOST_OOM if killed else FailureClass.NODE_LOST if whole else FailureClass.UNKNOWN
    confidence = Confidence.LIKELY if len(silent) == 1 or whole else Confidence.POSSIBLE
    who = _ranks(silent)
    why = f"{who} left no record, and the others noticed that somebody was gone"
    if whole:
        why += ": all ranks of one node"
    proof = [f"{who}: no record"]
    if killed:
        proof.append(f"kernel: oom_kill counter of {host} has risen")
    return Verdict(
        failure=failure,
        confidence=confidence,
        why=why,
        rank=silent[0] if len(silent) == 1 or whole else None,
        node=host,
        step=_step(findings),
        proof=tuple(proof),
        follows=_told(findings),
    )


def _local(said: Account) -> range:
    first = said.rank if said.first_rank is None else said.first_rank
    return range(first, first + said.local_ranks)


def _is_one_node(silent: Sequence[int], nodes: Mapping[str, range]) -> bool:
    """Say whether these are just the ranks of a node, as large as those that are known."""
    sizes = {len(local) for local in nodes.values()}
    return list(silent) == list(range(silent[0], silent[0] + len(silent))) and len(silent) in sizes


def _nobody(findings: Sequence[_Finding]) -> Verdict:
    """Every rank has left word, and all of it follows from something that is not among them."""
    owned = [each for each in findings if each.said.own]
    stray = _astray(owned)
    failures = {each.reading.failure for each in owned}
    if not owned:
        why, failure = "all processes were ended from outside", FailureClass.UNKNOWN
    elif failures == {FailureClass.COORDINATOR_LOST}:
        why, failure = (
            "no rank has failed by itself: all lost the store that they meet at",
            FailureClass.COORDINATOR_LOST,
        )
    elif FailureClass.HANG in failures:
        why, failure = "no rank has failed by itself: they have waited for each other in vain", FailureClass.HANG
    else:
        why, failure = "no rank has failed by itself, and none is missing: connections broke", FailureClass.NETWORK
    if stray is not None:
        why += f"; rank {stray.said.rank} was at {stray.said.place}, all others elsewhere"
    return Verdict(
        failure=failure,
        confidence=Confidence.LIKELY if failure is FailureClass.COORDINATOR_LOST else Confidence.POSSIBLE,
        why=why,
        rank=None if stray is None else stray.said.rank,
        node=None if stray is None else stray.said.host,
        step=_step(findings),
        proof=tuple(each.proof for each in findings[:_SHOWN]),
    )


def _verdict(
    chosen: _Finding, confidence: Confidence, why: str, *, proof: Sequence[_Finding], findings: Sequence[_Finding]
) -> Verdict:
    lines = [each.proof for each in proof[:_SHOWN]]
    if chosen.reading.line not in chosen.said.lines:  # what was around says more than its own words
        lines[1:1] = [f"rank {chosen.said.rank}: {line}" for line in chosen.said.lines[:1]]
    if chosen.said.place:
        lines.append(f"rank {chosen.said.rank}: at {chosen.said.place}")
    shown = {id(each) for each in proof}
    return Verdict(
        failure=chosen.reading.failure,
        confidence=confidence,
        why=why,
        rank=chosen.said.rank,
        node=chosen.said.host,
        step=_step([chosen]) if chosen.said.step is not None else _step(findings),
        proof=tuple(lines),
        follows=_told([each for each in findings if id(each) not in shown]),
    )


def _told(findings: Sequence[_Finding]) -> tuple[str, ...]:
    """Say what several ranks have in common once."""
    by_line: dict[str, list[int]] = {}
    for each in findings:
        by_line.setdefault(_VARYING.sub("#", each.reading.line), []).append(each.said.rank)
    first = {_VARYING.sub("#", each.reading.line): each.reading.line for each in reversed(findings)}
    return tuple(f"{_ranks(ranks)}: {first[line]}" for line, ranks in by_line.items())[:_SHOWN]


def _step(findings: Sequence[_Finding]) -> int | None:
    return max((each.said.step for each in findings if each.said.step is not None), default=None)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
