"""What is kept of a failure: bounded, readable again, and never in the way if it is torn."""

from __future__ import annotations

import msgspec
import pytest

from resilient.format.evidence import (
    MOST_NBYTES,
    Evidence,
    Explanation,
    Frame,
    decode,
    encode_evidence,
    encode_explanation,
)
from tests.docs.test_spec import table_after

RECORD = Evidence(
    generation=3,
    nonce="0123456789abcdef",
    rank=2,
    world_size=4,
    first_rank=0,
    local_world_size=4,
    host="a",
    pid=17,
    clock="boot",
    monotonic_s=1.5,
    wall_s=1e9,
    created="2026-01-01T00:00:00.000Z",
    lines=("ValueError: x",),
    frames=(Frame(owner="user", file="train.py", line=30, function="main"),),
    stderr=("a warning",),
)


def test_a_record_comes_back_as_it_was() -> None:
    assert decode(Evidence, encode_evidence(RECORD), "k") == RECORD


@pytest.mark.parametrize("letter", ["x", "é", "🏖", "\n", '"'])
def test_no_record_is_too_large_and_the_first_words_and_the_last_frames_stay(letter: str) -> None:
    frames = tuple(Frame(owner="user", file=letter * 900, line=line, function="f") for line in range(200))
    large = msgspec.structs.replace(
        RECORD,
        lines=("ValueError: first", *(letter * 5000 for _ in range(300))),
        frames=frames,
        stderr=(letter * 9999,) * 99,
    )
    data = encode_evidence(large)
    assert len(data) <= MOST_NBYTES
    kept = decode(Evidence, data, "k")
    assert kept is not None
    assert kept.lines[0] == "ValueError: first"
    assert kept.frames[-1].line == 199


@pytest.mark.parametrize("data", [b"", encode_evidence(RECORD)[:-9], encode_evidence(RECORD) + b" "])
def test_a_torn_record_says_nothing(data: bytes) -> None:
    assert decode(Evidence, data, "k") is None


def test_one_kind_is_not_taken_for_the_other() -> None:
    told = Explanation(
        generation=3,
        failure="user-error",
        confidence="certain",
        why="",
        rank=2,
        node="a",
        step=5,
        proof=("x",),
        follows=(),
        action="restart",
        because="",
        acted=True,
        created="",
    )
    assert decode(Explanation, encode_explanation(told), "k") == told
    assert decode(Evidence, encode_explanation(told), "k") is None


@pytest.mark.parametrize(("heading", "kind"), [("evidence", Evidence), ("frame", Frame), ("explanation", Explanation)])
def test_the_specification_has_these_members(heading: str, kind: type[msgspec.Struct]) -> None:
    assert [row[0] for row in table_after(f"### {heading}")] == list(kind.__struct_fields__)
