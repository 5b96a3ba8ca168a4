from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import UsageError
from resilient.policy.keep import Keep

STEPS = st.lists(st.integers(0, 1000), unique=True)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 50))
def test_the_newest_and_every_multiple_stay(steps: list[int], last: int, every: int | None) -> None:
    kept = Keep(last=last, every=every).kept(steps)
    newest = sorted(steps)[-last:]
    assert kept == {step for step in steps if step in newest or (every and step % every == 0)}
    assert not steps or max(steps) in kept


@pytest.mark.parametrize("arguments", [{"last": 0}, {"last": -1}, {"last": True}, {"every": 0}], ids=str)
def test_keeping_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must"):
        Keep(**arguments)
