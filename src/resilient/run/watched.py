"""A rank that is watched: its page, the thread that beats, the process that watches, and the times it tells others."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from resilient import events
from resilient.clock import Clock
from resilient.config import Settings
from resilient.detect import folders
from resilient.detect.page import Owner, Page
from resilient.detect.stacks import StackFile
from resilient.detect.words import PAGE, STACKS, Ended, Gone, Hung, Ready, Symptom, Task, WentOn, Word
from resilient.format.digest import digest
from resilient.run.opening import Opened
from resilient.run.picture_watch import PictureWatch
from resilient.run.sections import NoMarks, Sections
from resilient.run.watch_compute import Compute
from resilient.run.watch_process import WatchProcess
from resilient.run.watch_stragglers import StragglerWatch
from resilient.store.open import recipe

_SETTLE_S: Final = 0.25
"""A life that is over by then, such as that of a run which is complete, needs no watcher."""

_BEATS: Final = 4
"""In each interval."""

_END_S: Final = 2.0


class Watched:
    """Watches one life of a rank, from the moment at which it has its generation until `close`."""

    def __init__(self, opened: Opened, settings: Settings, *, bus: events.Bus, clock: Clock) -> None:
        self._opened = opened
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._rank = opened.peers.rank
        self._stacks: StackFile | None = None
        self._compute: Compute | None = None
        self._ended = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._live, name="resilient-beat", daemon=True)
        self._page = self._begin() if settings.on_hang != "off" else None
        self.sections = Sections(NoMarks(clock) if self._page is None else self._page, opened.counter)
        claim = opened.claim
        topic = f"picture/{claim.generation}-{claim.nonce}"
        self._picture = PictureWatch(opened.peers, settings, topic=topic, bus=bus, clock=clock)
        self._stragglers: StragglerWatch | None = None
        if opened.peers.world_size > 1:
            self._stragglers = StragglerWatch(
                self.sections,
                opened.peers,
                topic=f"stragglers/{claim.generation}-{claim.nonce}",
                every_s=settings.compare_every_s,
                bus=bus,
                clock=clock,
            )
        if self._page is not None:
            self._thread.start()

    def follow(self, items: Mapping[str, object]) -> None:
        """Begin to measure steps, and to compare this rank with others, by what these items compute."""
        self._picture.picture.follow(items)
        self.sections.turn_watch = self._picture.picture
        self._picture.start()
        if self._stragglers is None:
            return
        self._compute = Compute(items, clock=self._clock)
        self.sections.begin_compute, self.sections.end_compute = self._compute.begin, self._compute.end
        self._stragglers.start()

    def close(self) -> None:
        """End, as planned or with an error: whatever ends this process from now on is not what is watched for."""
        self._ended.set()
        os.eventfd_write(self._wake, 1)
        self._picture.close()
        if self._compute is not None:
            self._compute.close()
        if self._stragglers is not None:
            self._stragglers.close()
        if self._thread.is_alive():
            self._thread.join(_END_S + _SETTLE_S)
        if not self._thread.is_alive():
            os.close(self._wake)
        if self._stacks is not None:
            self._stacks.close()

    def _begin(self) -> Page | None:
        claim = self._opened.claim
        try:
            folder = folders.of_generation(claim.generation, claim.nonce)
            self._stacks = StackFile(folder / f"{STACKS}{self._rank}")
            owner = Owner(pid=os.getpid(), rank=self._rank, signal=self._stacks.signal, thread=threading.get_ident())
            return Page(folder / f"{PAGE}{self._rank}", owner, clock=self._clock)
        except OSError as error:
            self._notice(f"hangs of rank {self._rank} will not be seen: {error}")
            return None

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        page = self._page
        assert page is not None, "what this thread is for"
        beat_s = self._settings.watch_every_s / _BEATS
        watcher: WatchProcess | None = None
        try:
            if not self._ended.wait(_SETTLE_S):
                with suppress(OSError):  # others sweep as well
                    folders.sweep(self._clock.now().timestamp())
                watcher = self._start()
            while not self._ended.is_set():
                page.beat()
                watcher = self._hear(watcher, beat_s)
        except Exception as error:  # noqa: BLE001 -- thread main: training goes on without being watched
            self._notice(f"hangs of rank {self._rank} will not be seen any more: {type(error).__name__}: {error}")
        finally:
            page.close()
            if watcher is not None:
                watcher.close(_END_S)
            else:
                self._clear(page)

    def _start(self) -> WatchProcess | None:
        opened, settings, page = self._opened, self._settings, self._page
        assert page is not None, "of a thread that beats"
        known = recipe(opened.store)
        run = digest(opened.run_id.encode()).hex()[:16]
        task = Task(
            folder=str(page.path.parent),
            learned=str(folders.learned(run, self._rank)),
            rank=self._rank,
            world_size=opened.peers.world_size,
            generation=opened.claim.generation,
            nonce=opened.claim.nonce,
            interval_s=settings.watch_every_s,
            floor_s=settings.hang_floor_s,
            unlearned_s=settings.hang_after_s,
            restart=settings.on_hang == "restart",
            url=None if known is None else known.url,
            options={} if known is None else dict(known.options),
        )
        try:
            return WatchProcess(task)
        except OSError as error:
            self._notice(f"hangs of rank {self._rank} will not be seen: {error}")
            return None

    def _hear(self, watcher: WatchProcess | None, timeout_s: float) -> WatchProcess | None:
        """Wait until the next beat, or until the watcher says something; None from then on if it has ended."""
        if watcher is None:
            self._ended.wait(timeout_s)
            return None
        words = watcher.hear(timeout_s, self._wake)
        if words is None:
            status = watcher.close(_END_S)
            self._notice(f"hangs of rank {self._rank} will not be seen any more: its watcher has ended ({status})")
            return None
        for word in words:
            self._tell(word)
        return watcher

    def _tell(self, word: Word) -> None:
        match word:
            case Symptom():
                event: events.Event = events.InterpreterSilent(
                    rank=self._rank,
                    kind=word.kind,
                    section=word.section,
                    step=word.step,
                    silence_s=word.silence_s,
                )
            case Hung():
                event = events.HangFound(
                    rank=self._rank,
                    section=word.section,
                    step=word.step,
                    age_s=word.age_s,
                    timeout_s=word.timeout_s,
                    cause=word.cause,
                    cause_section=word.cause_section,
                    why=word.why,
                )
            case WentOn():
                event = events.HangOver(rank=self._rank, section=word.section, step=word.step)
            case Ready() | Ended() | Gone():
                return  # of the last two nobody is left to hear
        self._bus.emit(event)

    def _clear(self, page: Page) -> None:
        """Remove what no watcher has ever seen."""
        folder = page.path.parent
        for kind in (PAGE, STACKS):
            (folder / f"{kind}{self._rank}").unlink(missing_ok=True)
        with suppress(OSError):  # of the last rank only
            folder.rmdir()

    def _notice(self, message: str) -> None:
        self._bus.emit(events.Notice(rank=self._rank, message=message))
