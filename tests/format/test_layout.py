"""Keys say what they belong to, and are taken apart by the module that builds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient.format import layout
from resilient.format.layout import Attempt

ATTEMPTS = st.builds(
    Attempt,
    step=st.integers(0, 10**12 - 1),
    generation=st.integers(1, 10**8 - 1),
    nonce=st.text("0123456789abcdef", min_size=16, max_size=16),
)


@given(ATTEMPTS, st.integers(0, 10**6 - 1), st.integers(0, 1000))
def test_keys_lead_back_to_their_attempt(attempt: Attempt, rank: int, part: int) -> None:
    for key in (
        attempt.commit,
        attempt.tombstone,
        attempt.receipt(rank),
        attempt.manifest("ab"),
        attempt.mark("pinned", "x"),
    ):
        assert layout.parse_attempt(key) == (attempt, key.removeprefix(attempt.prefix))
    assert layout.parse_data(attempt.data(rank, part)) == attempt


@given(st.integers(0, 10**8 - 1))
def test_claims_lead_back_to_their_generation(generation: int) -> None:
    assert layout.parse_claim(layout.claim(generation)) == generation
    assert layout.parse_claim(layout.base(generation)) is None


def test_foreign_keys_belong_to_nothing() -> None:
    for key in ("", "steps/1/x", "data/zz/g", "generations/x.json", "steps/000000000001/g00000001-short/COMMIT"):
        assert (layout.parse_attempt(key), layout.parse_data(key), layout.parse_claim(key)) == (None, None, None)


def test_data_of_many_ranks_spreads_over_prefixes() -> None:
    attempt = Attempt(step=1, generation=1, nonce="0" * 16)
    assert len({attempt.data(rank, 0).split("/")[1] for rank in range(256)}) > 100
