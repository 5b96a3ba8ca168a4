"""Where all ranks of this node stand, taken before anything is done about a hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from resilient.clock import Clock, rfc3339
from resilient.detect import proc, stacks
from resilient.detect.page import Owner, PageView
from resilient.detect.words import PAGE, STACKS, Task
from resilient.format.hangs import Hang, Worker
from resilient.policy.progress import Patience, Progress

STEPS: Final = ("step", "first step", "warm-up")
"""Sections in which a rank may be in an exchange with others."""

_WARM_UP: Final = "warm-up"
_STEP: Final = "step"
_MOST_WORKERS: Final = 32
_COMMAND: Final = 200  # characters


def take_all(task: Task, host: str, found_by: int, clock: Clock) -> list[Hang]:
    """Return where each rank of this node stands that has a page and a process."""
    found = []
    for path in sorted(Path(task.folder).glob(f"{PAGE}*")):
        with suppress(OSError, ValueError):  # it has just ended, or not yet begun
            view = PageView(path)
            try:
                if not view.closed and proc.state(view.owner.pid) not in ("", "Z", "X"):
                    found.append(_take(task, view, host, found_by, clock))
            finally:
                view.close()
    return found


def _take(task: Task, view: PageView, host: str, found_by: int, clock: Clock) -> Hang:
    owner, glance, now_s = view.owner, view.glance(), clock.monotonic()
    file = Path(task.folder) / f"{STACKS}{owner.rank}"
    text = stacks.take(owner.pid, owner.signal, file, clock)
    frames = stacks.frames_of(text, owner.thread)
    state = proc.state(owner.pid)
    patience = Patience(floor_s=task.floor_s, unlearned_s=task.unlearned_s)
    section = stacks.section_of(frames, glance.section, STEPS)
    return Hang(
        generation=task.generation,
        nonce=task.nonce,
        rank=owner.rank,
        world_size=task.world_size,
        host=host,
        pid=owner.pid,
        found_by=found_by,
        step=glance.step,
        section=_STEP if section == _WARM_UP else section,
        age_s=round(now_s - glance.started_s, 3),
        timeout_s=Progress(task.interval_s, patience).timeout_s(glance.section, glance.seen),
        silent_s=round(max(0.0, now_s - glance.beat_s), 3),
        state=state,
        waits=stacks.waits(frames),
        signature=f"{stacks.signature(frames)} ({state})" if frames else "",
        created=rfc3339(clock.now()),
        waits_in=proc.waits_in(owner.pid),
        kernel_stack=proc.kernel_stack(owner.pid),
        stacks=text,
        workers=tuple(_workers(owner, file, clock)),
    )


def _workers(owner: Owner, file: Path, clock: Clock) -> Iterator[Worker]:
    for pid in proc.children(owner.pid)[:_MOST_WORKERS]:
        command = proc.command(pid)
        if "resilient.detect.watcher" in command or "resilient.writer" in command:
            continue
        yield Worker(
            pid=pid,
            command=command[:_COMMAND],
            state=proc.state(pid),
            waits_in=proc.waits_in(pid),
            # A forked one has inherited handler and file; of any other one the signal must not be sent.
            stacks=stacks.take(pid, owner.signal, file, clock),
        )
