"""What is to be reached, which figure says whether it is, and what stands beside it in the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from measuring import Figure

OURS = "resilient"
LIMITS = ("the machine", "raw read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for every figure whose benchmark, case and metric match these patterns.

    ``shown``: the metric in units of its own, told for resilient and for its peers, of which the best is shown. Their
    cases match ``peers``, or have another name before the same rest. ``limit``: the metric of the machine's limit, in a
    case that matches ``limits``, or else where the machine stands in resilient's place, or in the case itself.
    """

    number: int
    what: str
    benchmark: str
    case: str
    metric: str
    bound: float
    sense: Literal["at least", "at most"]
    shown: str | None = None
    better: Literal["more", "less"] = "less"
    peers: str | None = None
    limit: str | None = None
    limits: str | None = None

    def matches(self, figure: Figure) -> bool:
        return (
            figure.benchmark == self.benchmark
            and re.fullmatch(self.case, figure.case) is not None
            and re.fullmatch(self.metric, figure.metric) is not None
        )

    def reached(self, figure: Figure) -> bool:
        return figure.value >= self.bound if self.sense == "at least" else figure.value <= self.bound

    def own(self, figure: Figure, figures: Sequence[Figure]) -> Figure | None:
        """Return the same thing in units of its own."""
        return next((each for each in figures if each.case == figure.case and each.metric == self.shown), None)

    def best_peer(self, figure: Figure, figures: Sequence[Figure]) -> Figure | None:
        """Return the best that a peer reached in the same run."""
        shown = [each for each in figures if each.benchmark == figure.benchmark and each.metric == self.shown]
        if self.peers is not None:
            return self._best([each for each in shown if re.fullmatch(self.peers, each.case)])
        named = [(name_of(each, figure), each) for each in shown]
        return self._best([each for name, each in named if name and not name.startswith((OURS, *LIMITS))])

    def machine(self, figure: Figure, figures: Sequence[Figure]) -> Figure | None:
        """Return the limit that was measured in the same run."""
        if self.limit is None:
            return None
        others = [each for each in figures if each.benchmark == figure.benchmark]
        found = [each for each in others if re.fullmatch(self.limit, each.metric)]
        if self.limits is not None:
            return self._best([each for each in found if re.fullmatch(self.limits, each.case)])
        return self._best([each for each in found if (name_of(each, figure) or "").startswith((OURS, *LIMITS))])

    def _best(self, figures: Sequence[Figure]) -> Figure | None:
        if not figures:
            return None
        return (max if self.better == "more" else min)(figures, key=lambda each: each.value)


def name_of(other: Figure, figure: Figure) -> str | None:
    """Return who another figure is about if it has, but for that, the same case as one of resilient's own."""
    head, ours, tail = figure.case.partition(OURS)
    alike = ours and other.case.startswith(head) and other.case.endswith(tail)
    return other.case.removeprefix(head).removesuffix(tail) if alike else None


_LOOP = "lost per save, later ones"
_COPY = "copy of the state, one thread"

TARGETS = (
    Target(
        number=1,
        what="the call blocks, of 2 % of a copy + 5 us per tensor",
        benchmark="training_slowdown",
        case=f"{OURS},.*",
        metric="blocked, of what it may be.*",
        bound=1.0,
        sense="at most",
        shown="blocked, later saves",
        limit=_COPY,
    ),
    Target(
        number=1,
        what="the first save blocks, of the later ones",
        benchmark="training_slowdown",
        case=f"{OURS},.*",
        metric="first save blocked, of later ones",
        bound=2.0,
        sense="at most",
        shown="blocked, first save",
        limit=_COPY,
    ),
    Target(
        number=1,
        what="training loses less per save than with the best peer, ms",
        benchmark="training_slowdown",
        case=f"{OURS},.*",
        metric="lost per save less than the best peer.*",
        bound=0.0,
        sense="at least",
        shown=_LOOP,
        limit=_COPY,
    ),
    Target(
        number=2,
        what="steps per second, of those without saves",
        benchmark="training_slowdown",
        case=f"{OURS}, GPT.*",
        metric="steps per second, of those without saves",
        bound=0.97,
        sense="at least",
        shown="steps per second, of those without saves",
        better="more",
    ),
    Target(
        number=3,
        what="durable on the local disk, of the best raw write",
        benchmark="save",
        case=f"{OURS},.*",
        metric="durable, of best raw write",
        bound=0.9,
        sense="at least",
        shown="durable, later saves",
        better="more",
        limit="raw write.*",
    ),
    Target(
        number=3,
        what="processor time of all processes, of the best peer's",
        benchmark="save",
        case=f"{OURS},.*",
        metric="processor time, of best peer's.*",
        bound=0.25,
        sense="at most",
        shown="processor time",
    ),
    *(
        Target(
            number=5,
            what=what,
            benchmark="restore",
            case=f"{how}, {OURS}, .* GiB, {ranks}",
            metric=metric,
            bound=bound,
            sense="at least",
            shown="speed",
            better="more",
            limit="speed",
        )
        for what, how, ranks, metric, bound in (
            ("cold restore, of the best raw read", "cold", "saved on 1, restored on 1", "of best raw read", 0.9),
            ("warm restore, GiB/s", "warm", "saved on 1, restored on 1", "speed", 3.0),
            (
                "reshard, cold, of the best raw read",
                "cold",
                "saved on (1, restored on 2|2, .*)",
                "of best raw read",
                0.85,
            ),
        )
    ),
    *(
        Target(
            number=number,
            what=f"S3, {what}, of raw obstore (client-bound)",
            benchmark="s3",
            case=f"discarding endpoint: {way}, {OURS}.*",
            metric="of raw obstore, medians",
            bound=bound,
            sense="at least",
            shown="throughput",
            better="more",
            peers=f"SeaweedFS: {way}, (s3torchconnector|DCP).*",
            limit="throughput",
            limits=f"discarding endpoint: {way}, raw obstore",
        )
        for number, what, way, bound in ((4, "upload", "put", 0.8), (5, "download", "get", 0.9))
    ),
    Target(
        number=4,
        what="S3, processor time of the client with digests, s/GiB",
        benchmark="s3",
        case=f"discarding endpoint: put, {OURS}, with digests",
        metric="client CPU",
        bound=0.5,
        sense="at most",
        shown="client CPU",
        peers="SeaweedFS: put, (s3torchconnector|DCP).*",
        limit="client CPU",
        limits="discarding endpoint: put, raw obstore",
    ),
    Target(
        number=4,
        what="S3, extra memory of an upload, MiB",
        benchmark="s3",
        case=f"discarding endpoint: put, {OURS}(, with digests)?",
        metric="extra memory",
        bound=80.0,
        sense="at most",
        shown="extra memory",
        peers="SeaweedFS: put, (s3torchconnector|DCP).*",
    ),
    Target(
        number=6,
        what="memory while saving, of (slots + 0.05) x state + 200 MiB",
        benchmark="memory",
        case="saving.*",
        metric="peak, of what it may be.*",
        bound=1.0,
        sense="at most",
        shown="peak over the state",
    ),
    Target(
        number=6,
        what="memory while restoring, over the state (200 MiB + bounce buffers)",
        benchmark="memory",
        case="restoring.*",
        metric="peak over the state",
        bound=264.0,
        sense="at most",
    ),
    Target(
        number=6,
        what="growth of memory",
        benchmark="memory",
        case=".*saves of.*",
        metric="growth of memory",
        bound=8.0,
        sense="at most",
    ),
    Target(
        number=6,
        what="growth of open files, threads, shared memory",
        benchmark="memory",
        case=".*saves of.*",
        metric="growth of (open files|threads|shared memory)",
        bound=0.5,
        sense="at most",
    ),
    *(
        Target(
            number=7,
            what=what,
            benchmark="control plane",
            case=f"{ranks} ranks .*",
            metric=metric,
            bound=bound,
            sense="at most",
        )
        for what, ranks, metric, bound in (
            ("merge and commit, CPU seconds", 1024, "commit, CPU", 1.5),
            ("merge and commit, seconds", 32768, "commit, wall", 60.0),
            ("merge and commit, MiB", 32768, "commit, memory", 4096.0),
            ("plan of one rank's restore, seconds", 32768, "plan, (half the ranks|unrelated layout)", 1.0),
        )
    ),
    Target(
        number=8,
        what="bfloat16 weights over a slow link, speed of raw",
        benchmark="savings",
        case="bfloat16 weights over .*",
        metric="speed with compress=auto, of raw",
        bound=1.35,
        sense="at least",
    ),
    Target(
        number=8,
        what="the local disk gets raw bytes",
        benchmark="savings",
        case="bfloat16 weights on the local disk.*",
        metric="bytes written, of all",
        bound=0.99,
        sense="at least",
    ),
    Target(
        number=8,
        what="most parameters frozen: bytes sent, of a full save",
        benchmark="savings",
        case=".*frozen",
        metric="bytes sent, of a full save",
        bound=0.12,
        sense="at most",
    ),
)
