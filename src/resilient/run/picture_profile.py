"""One step under torch's profiler, in memory, and never in the way of a profiler of the program's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import profiler as of_torch

from resilient.config import export_unless_set
from resilient.run.picture_spans import Event, Looked, look, read

_STEPS_OF_PROGRAM: Final = "ProfilerStep"
_BEGINNINGS: Final = ("_prepare_profiler", "_enable_profiler")
"""What every profiler of torch calls when it begins."""

_SILENT: Final = "99"


class Profile:
    """Torch's profiler over one step of the thread that makes it; made by `begin`."""

    def __init__(self, profiler: Any, *, device: bool) -> None:
        self._profiler = profiler
        self._device = device
        self._pid = os.getpid()
        self._own: dict[str, Callable[..., Any]] = {}
        self.given_up = False

    @classmethod
    def begin(cls) -> Profile | None:
        """Begin to profile; None if the program profiles itself, or has a profiler that may begin at any step."""
        if torch.autograd._profiler_enabled() or _STEPS_OF_PROGRAM in of_torch.KinetoStepTracker._step_dict:  # noqa: SLF001 -- there is no other sign of them
            return None
        # The library under the profiler writes two lines to standard error for each profile, unless told so before
        # its first one (torch 2.13).
        export_unless_set(KINETO_LOG_LEVEL=_SILENT)
        device = torch.cuda.is_available()
        profile = cls(of_torch.profile(use_kineto=True, use_device="cuda" if device else None), device=device)
        if device:
            torch.cuda.synchronize()  # what was submitted before is not of this step
        profile._profiler.__enter__()
        profile._make_way()
        return profile

    def end(self) -> list[Event]:
        """End it, wait for the accelerator, and return the events; none if the program has begun to profile."""
        if self.given_up or os.getpid() != self._pid:
            return []
        self._close()
        results = self._profiler.kineto_results
        return [] if results is None else read(results.events(), device=self._device)

    def look(self) -> Looked | None:
        """End it; return what it shows, None if the program has begun to profile."""
        events = self.end()
        return None if self.given_up else look(events)

    def _make_way(self) -> None:
        """For the duration of this step: end when the program begins to profile, or its call would fail."""

        def wrapped(name: str) -> Callable[..., Any]:
            begin: Callable[..., Any] = getattr(of_torch, name)
            self._own[name] = begin

            def call(*args: Any, **named: Any) -> Any:
                if not self.given_up:
                    self.given_up = True
                    self._close()
                return begin(*args, **named)

            return call

        for name in _BEGINNINGS:
            if hasattr(of_torch, name):
                setattr(of_torch, name, wrapped(name))

    def _close(self) -> None:
        for name, begin in self._own.items():
            setattr(of_torch, name, begin)
        self._profiler.__exit__(None, None, None)
