"""The watcher of one rank: looks at its page several times a second, and says what it finds."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.detect import proc
from resilient.detect.page import PageView
from resilient.detect.reporting import Reporting, in_words
from resilient.detect.words import (
    JOURNAL,
    PAGE,
    STACKS,
    Ended,
    Entry,
    Gone,
    Hung,
    Symptom,
    Task,
    WentOn,
    Word,
    encode_line,
)
from resilient.policy import progress
from resilient.policy.progress import Patience, Progress, Seen, merged

LOOKS: Final = 4
"""In each interval."""

_KEEP_EVERY_S: Final = 60.0
_ABORTS_S: Final = 5.0
_POLL_S: Final = 0.05


class Watching:
    """Watches until the rank closes its page, or is gone. ``say`` gets what the trainer should hear of."""

    def __init__(self, task: Task, say: Callable[[Word], None], *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises OSError or ValueError: there is no page to watch."""
        self._task = task
        self._say_trainer = say
        self._clock = clock
        self._folder = Path(task.folder)
        self._page = PageView(self._folder / f"{PAGE}{task.rank}")
        self._pid = self._page.owner.pid
        self._learned = Path(task.learned)
        self._before = _read_learned(self._learned)
        patience = Patience(floor_s=task.floor_s, unlearned_s=task.unlearned_s)
        self._progress = Progress(task.interval_s, patience, self._before)
        self._reporting = Reporting(task, clock=clock)
        self._kept = Deadline(clock, _KEEP_EVERY_S)
        self._journal = os.open(
            self._folder / f"{JOURNAL}{task.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def run(self, words: int) -> None:
        """Look until there is nothing more to look at. ``words``: a descriptor on which the trainer says that it ends.

        The end of the process is seen at once: the kernel says it.
        """
        process = os.pidfd_open(self._pid)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(words, select.POLLIN)
        try:
            while not self._page.closed:
                ready = dict(poll.poll(1000 * self._task.interval_s / LOOKS))
                if process in ready:
                    self._gone()
                    return
                if words in ready:
                    poll.unregister(words)  # its end is seen by the page, or by the process
                    continue
                self.look()
            self._clear()
        finally:
            os.close(process)
            self._keep_learned()
            os.close(self._journal)

    def look(self) -> None:
        """Look once."""
        glance = self._page.glance()
        for found in self._progress.look(self._clock.monotonic(), glance):
            match found:
                case progress.Silent():
                    kind = "stopped" if proc.is_stopped(proc.state(self._pid)) else "silent"
                    self._symptom(kind, found)
                case progress.Heard():
                    self._symptom("heard", found)
                case progress.Overdue():
                    self._hung(found, glance.mark)
                case progress.WentOn():
                    self._reporting.withdraw()
                    self._say(WentOn(section=found.section, step=found.step))
        if self._kept.expired:
            self._kept = Deadline(self._clock, _KEEP_EVERY_S)
            self._keep_learned()

    def _symptom(self, kind: str, found: progress.Silent | progress.Heard) -> None:
        self._say(Symptom(kind=kind, section=found.section, step=found.step, silence_s=round(found.silence_s, 3)))

    def _hung(self, overdue: progress.Overdue, mark: int) -> None:
        hung, _ = self._reporting.report(overdue, mark)
        self._say(hung)
        if not hung.covered:
            self._print(in_words(self._task.rank, hung))
        # Who waits for a rank that is within its own time must not be ended: that rank's watcher sees when it is not.
        if self._task.restart and not hung.waits:
            self._end(hung, mark)

    def _end(self, hung: Hung, mark: int) -> None:
        """End the rank, unless it has gone on meanwhile; its agent then starts all of them anew."""
        if self._page.glance().mark != mark:
            return
        self._reporting.note_end()
        self._say(Ended(section=hung.section, step=hung.step))
        self._print(f"rank {self._task.rank} is ended: it hangs, and on_hang says to restart")
        with suppress(ProcessLookupError):
            if not proc.is_stopped(proc.state(self._pid)):  # a stopped one would not hear of it
                os.kill(self._pid, signal.SIGABRT)
                deadline = Deadline(self._clock, _ABORTS_S)
                while not deadline.expired and proc.state(self._pid) not in ("", "Z", "X"):
                    self._clock.sleep(_POLL_S)
            os.kill(self._pid, signal.SIGKILL)

    def _gone(self) -> None:
        if self._page.closed:
            self._clear()
            return
        glance = self._page.glance()
        age_s = round(self._clock.monotonic() - glance.started_s, 3)
        self._say(Gone(section=glance.section, step=glance.step, age_s=age_s))

    def _say(self, word: Word) -> None:
        entry = Entry(at_s=self._clock.monotonic(), rank=self._task.rank, pid=self._pid, word=word)
        with suppress(OSError):  # a full /dev/shm, which may be what it hangs by, must not end who tells it
            os.write(self._journal, encode_line(entry))
        self._say_trainer(word)

    def _print(self, line: str) -> None:
        """Tell people on standard error, which is the trainer's: it cannot do so itself."""
        with suppress(OSError):
            sys.stderr.write(f"resilient: {line}\n")
            sys.stderr.flush()

    def _keep_learned(self) -> None:
        now = self._page.seen()
        found = {
            name: merged(self._before.get(name, progress.NEVER), now.get(name, progress.NEVER))
            for name in {*self._before, *now}
        }
        partial = self._learned.with_name(f".{self._learned.name}-{os.getpid()}")
        with suppress(OSError):  # the next life then has to learn anew
            partial.write_bytes(msgspec.json.encode(found))
            partial.replace(self._learned)

    def _clear(self) -> None:
        """Remove what this rank has laid down, and the folder after the last one."""
        for kind in (PAGE, STACKS, JOURNAL):
            (self._folder / f"{kind}{self._task.rank}").unlink(missing_ok=True)
        if not any(self._folder.glob(f"{PAGE}*")):
            for path in list(self._folder.iterdir()):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()


def _read_learned(path: Path) -> dict[str, Seen]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Seen])
    except (OSError, msgspec.MsgspecError):
        return {}
