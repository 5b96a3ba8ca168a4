"""Where each object of a run lies: the only place that builds or takes apart keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN = "run.json"
GENERATIONS = "generations/"
STEPS = "steps/"
DATA = "data/"
CONTROL = "control/"
REQUESTS = "control/requests/"
EVIDENCE = "control/evidence/"
HANGS = "control/hangs/"
JOURNALS = "journal/"

_ATTEMPT = re.compile(r"steps/(\d{12})/g(\d{8})-([0-9a-f]{16})/(.*)", re.DOTALL)
_CLAIM = re.compile(r"generations/(\d{8})\.json")
_HANG = re.compile(r"control/hangs/(\d{8})-(\d{6,})")
_REQUEST = re.compile(r"control/requests/(\d{8})\.json")
_EVIDENCE = re.compile(r"control/evidence/(\d{8})/\d{6}(-seen|-there)?\.json")
_OF_FAILURE = re.compile(r"control/evidence/(\d{8})/[^/]+")
_JOURNAL = re.compile(r"journal/g(\d{8})-([0-9a-f]{16})/(\d{6})-([a-z]+)-(\d{6})\.jsonl")
_DATA = re.compile(r"data/[0-9a-f]{2}/g(\d{8})-([0-9a-f]{16})/(\d{12})-(\d{6})-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try at saving one step: its name follows from generation, the generation's nonce and the step.

    Every rank can therefore name it without asking anybody.
    """

    step: int
    generation: int
    nonce: str

    @property
    def prefix(self) -> str:
        return f"steps/{self.step:012d}/g{self.generation:08d}-{self.nonce}/"

    @property
    def commit(self) -> str:
        return self.prefix + "COMMIT"

    @property
    def tombstone(self) -> str:
        return self.prefix + "TOMBSTONE"

    def tombstone_of(self, continued_by: int) -> str:
        """Return the key of what gives this attempt up for a line on which that generation continues from it."""
        return f"{self.tombstone}-{continued_by:08d}"

    @property
    def receipts(self) -> str:
        return self.prefix + "receipts/"

    @property
    def marks(self) -> str:
        return self.prefix + "marks/"

    def receipt(self, rank: int) -> str:
        return f"{self.receipts}{rank:06d}"

    def manifest(self, digest_hex: str) -> str:
        return f"{self.prefix}manifest-{digest_hex}"

    def mark(self, kind: str, name: str) -> str:
        return f"{self.marks}{kind}-{name}"

    def data(self, rank: int, part: int) -> str:
        """Return the key of a data object; its hashed prefix spreads a save over an object store's partitions."""
        spread = (rank * 0x9E3779B1 >> 12) & 0xFF
        return f"data/{spread:02x}/g{self.generation:08d}-{self.nonce}/{self.step:012d}-{rank:06d}-{part}"

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


def claim(generation: int) -> str:
    return f"generations/{generation:08d}.json"


def base(generation: int) -> str:
    return f"generations/{generation:08d}.base.json"


def outcome(generation: int) -> str:
    return f"generations/{generation:08d}.end.json"


def newest(generation: int) -> str:
    return f"generations/{generation:08d}.newest.json"


def heartbeat(launch: str) -> str:
    return f"control/launch-{launch}"


def request(number: int) -> str:
    return f"{REQUESTS}{number:08d}.json"


def hang(generation: int, rank: int) -> str:
    return f"{HANGS}{generation:08d}-{rank:06d}"


def parse_hang(key: str) -> tuple[int, int] | None:
    """Return generation and rank of the hang record that a key is."""
    found = _HANG.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def evidence(generation: int, rank: int | None = None, what: str = "") -> str:
    """Return the key of what a rank has left of a failure, or of all ranks' the prefix.

    ``what``: "-seen", what another rank has seen of its end; "-there", where it was when another rank ended.
    """
    prefix = f"{EVIDENCE}{generation:08d}/"
    return prefix if rank is None else f"{prefix}{rank:06d}{what}.json"


def explanation(generation: int) -> str:
    return f"{EVIDENCE}{generation:08d}/explanation.json"


def is_evidence(key: str) -> bool:
    """Say whether a key is that of a record of one rank."""
    return _EVIDENCE.fullmatch(key) is not None


def parse_evidence(key: str) -> int | None:
    """Return the generation of whose failure a key tells, be it a record or an explanation."""
    found = _OF_FAILURE.fullmatch(key)
    return int(found[1]) if found else None


def journals(generation: int, nonce: str) -> str:
    """Return the prefix of what the ranks of a generation have written down."""
    return f"{JOURNALS}g{generation:08d}-{nonce}/"


def journal(generation: int, nonce: str, rank: int, stream: str, number: int) -> str:
    """Return the key of one segment of a rank's journal; ``stream``: "events" or "machine"."""
    return f"{journals(generation, nonce)}{rank:06d}-{stream}-{number:06d}.jsonl"


def parse_journal(key: str) -> tuple[int, str, int, str, int] | None:
    """Return generation, nonce, rank, stream and number of the segment that a key is."""
    found = _JOURNAL.fullmatch(key)
    return (int(found[1]), found[2], int(found[3]), found[4], int(found[5])) if found else None


def parse_request(key: str) -> int | None:
    """Return the number of the request that a key is."""
    found = _REQUEST.fullmatch(key)
    return int(found[1]) if found else None


def parse_claim(key: str) -> int | None:
    """Return the generation that a key is the claim of."""
    found = _CLAIM.fullmatch(key)
    return int(found[1]) if found else None


def parse_attempt(key: str) -> tuple[Attempt, str] | None:
    """Return the attempt that a key under ``steps/`` belongs to, and the rest of the key."""
    found = _ATTEMPT.fullmatch(key)
    return (Attempt(step=int(found[1]), generation=int(found[2]), nonce=found[3]), found[4]) if found else None


def parse_data(key: str) -> Attempt | None:
    """Return the attempt that a data object belongs to."""
    found = _DATA.fullmatch(key)
    return Attempt(step=int(found[3]), generation=int(found[1]), nonce=found[2]) if found else None


def parse_rank(key: str) -> int | None:
    """Return the rank that a data object was stored by."""
    found = _DATA.fullmatch(key)
    return int(found[4]) if found else None
