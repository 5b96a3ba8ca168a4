"""Runs made by hand: what their ranks would have left in a store, at times that a test chooses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from resilient.catalog.beat import Sign
from resilient.catalog.hangs import keep_hang
from resilient.clock import rfc3339
from resilient.events import Event
from resilient.format import layout
from resilient.format.documents import Base, Claim, Commit, RunInfo, encode_document
from resilient.format.evidence import Evidence, encode_evidence
from resilient.format.frame import seal_json
from resilient.format.hangs import Hang
from resilient.format.journal import Header, Record, encode_header, encode_record
from resilient.store.memory import MemoryStore

BEGAN_S = 1_796_128_200.0
"""All times of a history count from here."""

RUN = "b7c1" * 8


@dataclass
class History:
    """A store in which generations leave their word."""

    store: MemoryStore = field(default_factory=MemoryStore)
    generations: int = 0

    def __post_init__(self) -> None:
        self.store.create(layout.RUN, encode_document(RunInfo(run_id=RUN, created=at(0.0))))

    def claim(self, created_s: float, *, ranks: int = 1, launch: str = "a", resumed: tuple[int, int] | None = None,
              based: bool = True) -> int:  # fmt: skip
        """Begin a generation; ``resumed``: step and generation of what it goes on from."""
        self.generations += 1
        number = self.generations
        document = Claim(
            generation=number, nonce=nonce(number), launch=launch, world_size=ranks, host="node", pid=100 + number,
            process_started="", created=at(created_s), versions={}, heartbeat=True,
        )  # fmt: skip
        self.store.create(layout.claim(number), encode_document(document))
        if based:
            step, source = resumed or (None, None)
            base = Base(
                generation=number, nonce=nonce(number), step=step, base_generation=source,
                base_nonce=None if source is None else nonce(source), manifest=None if source is None else "0" * 32,
            )  # fmt: skip
            self.store.create(layout.base(number), encode_document(base))
        return number

    def journal(self, generation: int, process_began_s: float, records: list[tuple[float, Event]], *, rank: int = 0,
                ranks: int = 1, launch: str = "a", pid: int | None = None, began_s: float | None = None,
                sla: float | None = None, host: str = "node", ahead_s: float = 0.0,
                stream: str = "events") -> None:  # fmt: skip
        """Write down what a rank tells, at which times; all but the times of events by a clock that is ``ahead_s``."""
        header = Header(
            run_id=RUN, generation=generation, nonce=nonce(generation), launch=launch, rank=rank, world_size=ranks,
            host=host, pid=1000 * generation + rank if pid is None else pid,
            process_began_s=BEGAN_S + process_began_s + ahead_s,
            began_s=BEGAN_S + (process_began_s if began_s is None else began_s) + ahead_s, sla=sla,
        )  # fmt: skip
        lines = [
            encode_header(header),
            *(encode_record(Record(BEGAN_S + at_s + ahead_s, event)) for at_s, event in records),
        ]
        self.store.put(layout.journal(generation, nonce(generation), rank, stream, 0), lines)

    def failed(self, generation: int, at_s: float, *, rank: int = 0, ranks: int = 1, seen_by: int | None = None,
               step: int | None = None, said: str = "ValueError: no label") -> None:  # fmt: skip
        """Leave how a rank failed, or was seen to end."""
        evidence = Evidence(
            generation=generation, nonce=nonce(generation), rank=rank, world_size=ranks, first_rank=0,
            local_world_size=ranks, host="node", pid=1, clock="boot", monotonic_s=at_s, wall_s=BEGAN_S + at_s,
            created=at(at_s), lines=(said,), step=step, seen_by=seen_by,
        )  # fmt: skip
        what = "" if seen_by is None else "-seen"
        self.store.create(layout.evidence(generation, rank, what), encode_evidence(evidence))

    def commit(self, generation: int, at_s: float, step: int, reason: str) -> None:
        """Commit a step, of which there is nothing but that."""
        document = Commit(
            step=step, generation=generation, nonce=nonce(generation), manifest="0" * 32, manifest_nbytes=1, nbytes=1,
            world_size=1, items=(), created=at(at_s), reason=reason, committer=0,
        )  # fmt: skip
        self.store.create(document.attempt.commit, encode_document(document))

    def sign(self, at_s: float, launch: str = "a") -> None:
        """Give a sign of life."""
        sign = Sign(host="node", pid=1, process_started="", interval_s=5.0, seen=at(at_s), count=1)
        self.store.put(layout.heartbeat(launch), [seal_json(asdict(sign))])

    def hangs(self, generation: int, at_s: float, *, step: int, age_s: float) -> None:
        """Keep where rank 0 stood when it was found to hang."""
        hang = Hang(
            generation=generation, nonce=nonce(generation), rank=0, world_size=1, host="node", pid=1, found_by=0,
            step=step, section="step", age_s=age_s, timeout_s=age_s, silent_s=1.0, state="S", waits=0, signature="",
            created=at(at_s),
        )  # fmt: skip
        keep_hang(self.store, hang)


def at(seconds: float) -> str:
    return rfc3339(datetime.fromtimestamp(BEGAN_S + seconds, UTC))


def nonce(generation: int) -> str:
    return f"{generation:016x}"
