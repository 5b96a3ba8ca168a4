"""What asks this process to stop: signals, its agent, a file, a request in the store, the owner of the machine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from resilient.catalog.requests import Request, RequestWatch, newest_request
from resilient.clock import Clock
from resilient.config import Process, Settings
from resilient.detect.file import StopFile
from resilient.detect.metadata import cloud_source
from resilient.detect.notice import Notice
from resilient.detect.polling import Poller
from resilient.detect.signals import StopSignals
from resilient.elastic.node import Node
from resilient.run.opening import Opened
from resilient.store.base import Store
from resilient.store.retrying import Retrying

_STORE_POLL_S: Final = 3.0
_CLOUD_POLL_S: Final = 2.0
_FILE_POLL_S: Final = 0.5
_LEAD_S: Final = 30.0
"""How long before its machine goes a run stops, besides the time of a save: until then the notice may be withdrawn."""


class StoreRequests:
    """Requests of people through the store; a source. Those asked of an earlier launch do not count."""

    def __init__(self, store: Store, launch: str) -> None:
        self.name = store.url
        self._store = store.within(_STORE_POLL_S) if isinstance(store, Retrying) else store
        self._launch = launch
        self._watch: RequestWatch | None = None
        self._found: Notice | None = None

    def begin(self) -> None:
        """Take note of what was asked before; whoever asked it of this launch means its restarts, too.

        Raises:
            StoreError: the store does not answer: the first poll does it then.
        """
        number, request = newest_request(self._store)
        self._watch = RequestWatch(self._store, number)
        if request is not None and request.is_for(self._launch):
            self._take(request)

    def poll(self) -> Notice | None:
        if self._watch is None:
            self.begin()
        assert self._watch is not None, "begun"
        while (request := self._watch.poll()) is not None:
            self._take(request)
        return self._found

    def _take(self, request: Request) -> None:
        if request.kind == "stop":  # the size is for agents
            self._found = Notice(why=f"a request to stop ({request.why})" if request.why else "a request to stop")


class StopSources:
    """All of them, for one rank. ``look`` may be called often, from one thread."""

    def __init__(
        self,
        opened: Opened,
        settings: Settings,
        process: Process,
        *,
        grace_s: float,
        notice: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._grace_s = grace_s
        self._notice = notice
        names = [] if settings.stop_signals == "none" else settings.stop_signals.split(",")
        self.signals = StopSignals(signal.Signals[name] for name in names)
        self.node = None if process.node_dir is None else Node(Path(process.node_dir))
        self._pollers = []
        if settings.stop_file is not None:
            file = StopFile(Path(settings.stop_file), keep=None if self.node is None else self.node.keep)
            self._pollers.append(Poller(file, _FILE_POLL_S, notice=notice))
        if opened.peers.rank == 0:
            requests = StoreRequests(opened.store, opened.claim.launch)
            self._pollers.append(Poller(requests, _STORE_POLL_S, notice=notice))
        if settings.notices != "off" and process.local_rank == 0:
            cloud = cloud_source(settings.notices, settings.notices_url, clock)
            self._pollers.append(Poller(cloud, _CLOUD_POLL_S, notice=notice))
        self._hinted = ""
        self.heard: set[int] = set()

    def start(self) -> None:
        """Begin to listen; in the main thread, or signals stay what they are."""
        left = self.signals.install()
        if left:
            names = ", ".join(signal.Signals(number).name for number in left)
            self._notice(f"{names}: handled by native code, ignored, or not ours to handle in this thread; left as is")
        for poller in self._pollers:
            poller.start()

    def look(self, timeout_s: float, *, save_s: float) -> Notice | None:
        """Return what asks for a stop, if something does; wait so long for a signal.

        ``save_s``: how long a save takes, so much earlier than at the last moment a notice that comes early counts.
        """
        heard = self.signals.wait(timeout_s)
        self.heard |= heard
        if heard:
            return Notice(why=signal.Signals(min(heard)).name, within_s=self._grace_s)
        return self._asked() or self._told(save_s)

    def close(self) -> None:
        for poller in self._pollers:
            poller.close()
        self.signals.close()

    def _asked(self) -> Notice | None:
        if self.node is None:
            return None
        try:
            asked = self.node.asked()
        except (OSError, msgspec.MsgspecError):
            return None  # the agent is gone, and with it this process in a moment
        return None if asked is None else Notice(why=asked.why, kind=asked.kind)

    def _told(self, save_s: float) -> Notice | None:
        """Return what pollers have found: a notice that may be withdrawn counts once there is no time to lose."""
        for poller in self._pollers:
            found = poller.newest
            if found is None:
                continue
            late = found.within_s is None or found.within_s <= _LEAD_S + 2 * save_s
            if late and not found.early:
                return found
            if found.why != self._hinted:
                self._hinted = found.why
                when = "" if found.within_s is None else f", in {found.within_s:.0f} s"
                self._notice(f"{found.why}{when}; training goes on for now")
        return None
