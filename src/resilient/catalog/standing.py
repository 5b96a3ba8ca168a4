"""Which rank a hung job waits for, from the records of where its ranks stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from resilient.format.hangs import Hang
from resilient.policy.progress import HangVerdict, Standing, first_cause

STOPPED: Final = ("T", "t")  # as the kernel names the state of a process that a signal or a debugger has stopped


def standing(hang: Hang) -> Standing:
    """Return what `resilient.policy.progress.first_cause` decides from."""
    return Standing(
        rank=hang.rank,
        section=hang.section,
        step=hang.step,
        age_s=hang.age_s,
        waits=hang.waits,
        signature=hang.signature,
        stopped=hang.state in STOPPED,
    )


def cause_of(hangs: Sequence[Hang]) -> HangVerdict:
    """Return which rank the others wait for; ``hangs`` is not empty."""
    return first_cause([standing(each) for each in hangs], hangs[0].world_size)
