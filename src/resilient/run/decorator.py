"""The decorator that makes a training function survive."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from resilient.clock import SYSTEM_CLOCK
from resilient.config import read_process, read_settings
from resilient.engine.peers import Peers
from resilient.events import Bus
from resilient.observe.logs import show_logs
from resilient.observe.sinks import find_sinks
from resilient.policy.interval import SaveWhen, parse_every
from resilient.policy.keep import Keep
from resilient.run.exits import exit_noted
from resilient.run.failures import program_of
from resilient.run.opening import opened, process_group
from resilient.run.orphans import end_with_agent
from resilient.run.session import Run
from resilient.run.telling import Telling
from resilient.run.witness import Witness
from resilient.store.base import Store
from resilient.store.open import open_store

P = ParamSpec("P")
R = TypeVar("R")


def train(
    store: str | os.PathLike[str] | Store,
    *,
    every: str | int | SaveWhen | None = None,
    keep: int | Keep | None = None,
    **settings: Any,
) -> Callable[[Callable[Concatenate[Run, P], R]], Callable[P, R]]:
    """Make a training function continue from its newest checkpoint, and save as it goes; it gets a `Run` first.

    Works unchanged in one process and under torchrun. Starts a process group if a launcher started this process and
    the program has not made one.

    Args:
        store: where the checkpoints of this run are: a path, a URL, or a `Store`.
        every: how often to save: ``"auto"`` (as often as pays; the default), a duration such as ``"90s"``, a number
            of steps, or a `SaveWhen`.
        keep: which checkpoints stay: a `Keep`, or how many of the newest; 3 by default.
        settings: any of `resilient.config.Settings`, such as ``resume="required"`` or ``takeover=True``. What is
            not passed here comes from ``RESILIENT_<NAME>``, then from ``[tool.resilient]`` in ``pyproject.toml``.

    Raises:
        UsageError: a setting that does not exist or makes no sense, or a place that cannot be opened, because a package
            is missing for example; raised here, not at the first save.
    """
    chosen = read_settings(settings if keep is None or isinstance(keep, Keep) else {**settings, "keep": keep})
    policy = parse_every(chosen.every if every is None else every, rpo_s=chosen.rpo)
    retention = keep if isinstance(keep, Keep) else Keep(last=chosen.keep)
    place = open_store(store, storage_options=chosen.storage_options)  # asks nothing of it yet
    sinks = find_sinks(chosen)

    def decorate(function: Callable[Concatenate[Run, P], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def main(*args: P.args, **kwargs: P.kwargs) -> R:
            process, bus = read_process(), Bus()
            end_with_agent(process, SYSTEM_CLOCK)
            show_logs(bus)
            with (
                exit_noted(process),
                process_group(process, chosen),
                sinks.attached(bus, process, run=place.url, rank=Peers.current().rank),
                opened(place, process, chosen, bus=bus, clock=SYSTEM_CLOCK) as start,
                Telling(start, chosen, bus=bus, clock=SYSTEM_CLOCK) as telling,
                Witness(start, process, bus=bus, clock=SYSTEM_CLOCK) as witness,
                Run(start, chosen, policy, retention, program=program_of(function), bus=bus) as run,
                witness.listening(run),
                telling.following(run),
            ):
                result = function(run, *args, **kwargs)
            for number in start.late:  # not before the end of the run is noted: this may be the end of the process
                signal.raise_signal(number)
            return result

        return main

    return decorate
