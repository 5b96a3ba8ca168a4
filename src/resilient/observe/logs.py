"""Events as lines for people, through the standard library's logging."""

from __future__ import annotations

import logging
from typing import Final

from resilient import events
from resilient.format import sizes
from resilient.observe.torch_logs import leave_to_torch

LOGGER: Final = logging.getLogger("resilient")
_MOST_RANKS: Final = 16
_LONGEST: Final = 500  # some events carry samples by the hundred
LOGGER.addHandler(logging.NullHandler())


def show_logs(bus: events.Bus, *, only: tuple[type[events.Event], ...] = (events.Event,)) -> None:
    """Write the events of ``bus`` to the logger ``resilient``; where no logging is configured, to standard error.

    ``only``: the kinds of events that are written.
    """
    lines = Lines()
    bus.subscribe(lambda event: lines(event) if isinstance(event, only) else None)
    leave_to_torch(LOGGER)
    if not any(isinstance(handler, _Fallback) for handler in LOGGER.handlers):
        LOGGER.addHandler(_Fallback())
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)


class Lines:
    """A sink: one line for each event, at a level that says who needs it."""

    def __init__(self) -> None:
        self._last_skip = ""

    def __call__(self, event: events.Event) -> None:
        """Log one event. What all ranks have in common is said by rank 0 alone."""
        level, message = _describe(event)
        if isinstance(event, events.SaveSkipped):
            # A store that is slower than the interval skips many for one reason: said once, and counted at the end.
            level = logging.DEBUG if event.why == self._last_skip else level
            self._last_skip = event.why
        if event.rank != 0:
            level = level if isinstance(event, events.SaveFailed | events.SaveSkipped) else logging.DEBUG
            message = f"rank {event.rank}: {message}"
        LOGGER.log(level, "%s", message)


def in_words(event: events.Event) -> str:
    """Return an event in words, as it is logged."""
    return _describe(event)[1]


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Standard error, as long as nobody else takes the records."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("resilient: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        taken = logging.getLogger().handlers or any(
            not isinstance(handler, _Fallback | logging.NullHandler) for handler in LOGGER.handlers
        )
        if not taken:
            super().emit(record)


def _describe(event: events.Event) -> tuple[int, str]:
    match event:
        case events.GenerationStarted() | events.Restored() | events.FellBack():
            return _describe_start(event)
        case (
            events.Demoted()
            | events.Reinstated()
            | events.Refused()
            | events.FailureExplained()
            | events.StragglerFound()
            | events.ShareMissed()
        ):
            return logging.WARNING, _describe_judgement(event)
        case events.SaveCommitted() | events.SaveFailed() | events.SaveSkipped() | events.StateUnchanged():
            return _describe_save(event)
        case events.StopAsked() | events.Stopped():
            return _describe_stop(event)
        case events.Notice() | events.RestoredFromTiers() | events.TiersFinished() | events.AtStake():
            return logging.INFO, _describe_news(event)
        case _:
            return _describe_numbers(event)


def _describe_straggler(event: events.StragglerFound) -> str:
    times = f"{1000 * event.own_s:.1f} ms a step, {1000 * event.best_s:.1f} ms on the fastest rank"
    return f"rank {event.straggler} is slow in {event.section}: {times}, {event.reports} reports in a row"


def _describe_save(
    event: events.SaveCommitted | events.SaveFailed | events.SaveSkipped | events.StateUnchanged,
) -> tuple[int, str]:
    match event:
        case events.SaveCommitted():
            return logging.INFO, f"saved step {event.step} ({sizes.in_words(event.nbytes)}, {event.duration_s:.1f} s)"
        case events.SaveFailed():
            again = f" ({event.failures} in a row)" if event.failures > 1 else ""
            return logging.WARNING, f"the save of step {event.step} failed{again}, training goes on: {event.error}"
        case events.SaveSkipped():
            return logging.WARNING, f"no save at step {event.step}: {event.why}"
        case events.StateUnchanged():
            return logging.WARNING, (
                f"training changes nothing: every trained parameter at step {event.step} is what it was at step "
                f"{event.since}, although optimizers have stepped (is the learning rate 0? does the optimizer have the "
                "parameters of this model?)"
            )


def _describe_start(event: events.GenerationStarted | events.Restored | events.FellBack) -> tuple[int, str]:
    match event:
        case events.GenerationStarted(resumed_step=None):
            return logging.INFO, f"fresh start in {event.url} ({_life(event)})"
        case events.GenerationStarted():
            return logging.INFO, f"resumed at step {event.resumed_step} from {event.url} ({_life(event)})"
        case events.Restored():
            read = sizes.in_words(event.nbytes_read)
            what = f"{read} read and verified by rank {event.rank} in {event.duration_s:.1f} s"
            return logging.INFO, f"restored step {event.step}, saved by {_ranks(event.saved_world_size)}: {what}"
        case events.FellBack():
            return logging.WARNING, f"step {event.step} is not usable, taking an older one: {event.why}"


def _describe_numbers(event: events.Event) -> tuple[int, str]:
    match event:
        case events.NumericFault():
            shown = {
                "transient": "fine when it was run again: a fault of the moment, perhaps of that rank's hardware",
                "reproducible": "the same bits when it was run again: it comes from the data, the state or the code",
                "not run again": "it could not be run again: gradients of earlier turns would be lost",
                "unstable": f"sick in {event.reruns + 1} tries, and not twice alike: suspect that rank's hardware",
            }[event.outcome]
            return logging.WARNING, f"step {event.step}: {event.what}; {shown}; action: {event.action}"
        case events.ReplicaDiffers(ranks=()):
            return logging.WARNING, (
                f"parameters differ between the replicas on ranks {_numbers(event.holders)} at step {event.step}; which"
                " of them is wrong cannot be told: it takes three replicas, with a majority that agrees"
            )
        case events.ReplicaDiffers():
            return logging.WARNING, (
                f"parameters of rank {_numbers(event.ranks)} are not those of the other replicas (ranks"
                f" {_numbers(event.holders)}) at step {event.step}: silent corruption; check that node, and continue"
                " from a checkpoint that was saved before"
            )
        case _:
            return logging.DEBUG, str(event)[:_LONGEST] if LOGGER.isEnabledFor(logging.DEBUG) else ""


def _numbers(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return shown if len(ranks) <= _MOST_RANKS else f"{shown}, ... ({len(ranks)} in all)"


def _describe_stop(event: events.StopAsked | events.Stopped) -> tuple[int, str]:
    match event:
        case events.StopAsked():
            within = "" if event.within_s is None else f" ({event.within_s:g} s are left)"
            return logging.INFO, f"{event.why}: all ranks stop at the next step that none has passed{within}"
        case events.Stopped(error=None):
            end = "the workers make way" if event.kind == "resize" else "start it again to go on"
            return logging.INFO, f"stopped at step {event.step} by {event.why}: saved; {end}"
        case events.Stopped():
            newest = "nothing is saved" if event.newest is None else f"the newest committed step is {event.newest}"
            return logging.WARNING, f"stopped at step {event.step} by {event.why}: not saved ({event.error}); {newest}"


def _describe_news(
    event: events.Notice | events.RestoredFromTiers | events.TiersFinished | events.AtStake,
) -> str:
    match event:
        case events.Notice():
            return event.message
        case events.RestoredFromTiers():
            total = sum(nbytes for _, nbytes in event.sources) or 1
            parts = ", ".join(f"{100 * nbytes / total:.0f} % from {source}" for source, nbytes in event.sources)
            return f"restored step {event.step}: {parts or 'nothing was read'}"
        case events.TiersFinished():
            what = f"{sizes.in_words(event.nbytes)} copied to the store in {event.duration_s:.1f} s"
            return f"step {event.step} was complete in the tiers of the nodes, and is committed now ({what})"
        case events.AtStake():
            process = _since(event.process_step, event.process_source)
            return f"a lost process costs {process} now, a lost node {_since(event.node_step, event.node_source)}"


def _since(step: int | None, source: str) -> str:
    return "all steps" if step is None else f"the steps since {step} ({source})"


def _describe_judgement(
    event: events.Demoted
    | events.Reinstated
    | events.Refused
    | events.FailureExplained
    | events.StragglerFound
    | events.ShareMissed,
) -> str:
    match event:
        case events.ShareMissed():
            return event.message
        case events.FailureExplained():
            return _describe_failure(event)
        case events.StragglerFound():
            return _describe_straggler(event)
        case events.Demoted():
            return f"step {event.step} is marked failed from now on: {event.why}"
        case events.Reinstated():
            return f"step {event.step} is not marked failed any more: {event.why}"
        case events.Refused():
            return f"no further try: {event.why}"


def _describe_failure(event: events.FailureExplained) -> str:
    where = "" if event.at_rank is None else f" on rank {event.at_rank}"
    where += "" if event.node is None else f" ({event.node})"
    proof = f": {event.proof[0]}" if event.proof else f": {event.why}"
    advice = "" if event.acts else "advice: "
    return (
        f"generation {event.generation} failed by {event.failure}{where}, {event.confidence}{proof}; "
        f"{advice}{event.action} ({event.because})"
    )


def _life(event: events.GenerationStarted) -> str:
    return f"generation {event.generation}, {_ranks(event.world_size)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
