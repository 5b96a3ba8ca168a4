"""What an account says in plain words: the state of a run, whose fault a failure is, what to change."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Final

from resilient.format import sizes
from resilient.policy.failures.classes import ABOUT, About, Action, FailureClass, Owner
from resilient.report.model import PRODUCTIVE, End, Incident, Ledger, Part, Parts, Stake
from resilient.report.units import count, duration, join, number, one_line, percent, printable

MEANING: Final[dict[Part, str]] = {
    Part.COMPUTE: "computing: forward, backward, optimizer",
    Part.EXCHANGE: "in collectives while nothing is computed",
    Part.DATA: "waiting for the next batch",
    Part.OUTSIDE: "in the training function, outside the steps",
    Part.SAVE: "training held up by a save",
    Part.RESTORE: "reading a checkpoint back",
    Part.START: "from starting the processes to the first step",
    Part.LOST: "steps that were computed and thrown away by a failure",
    Part.DETECTION: "from the failure until it was noticed",
    Part.REFORMATION: "until the ranks that go on have met again",
    Part.IDLE: "nothing was running",
}
"""What each part of the time is, in a few words."""

OWNERS: Final = {
    Owner.USER: "the training program (its code, data or settings)",
    Owner.PLATFORM: "the platform (a machine, the network or the storage)",
    Owner.EITHER: "not settled: the program or the platform",
}

_DONE: Final = {
    Action.RETRY: "started again as it was",
    Action.RESTART: "started again on the same nodes",
    Action.EXCLUDE_NODE: "started again without the node",
    Action.FALL_BACK: "started again from an older checkpoint",
    Action.STOP: "not started again before it is mended",
}

_ENDS: Final = {
    End.DONE: "has ended as planned",
    End.STOPPED: "was stopped, and goes on from there at its next start",
    End.FAILED: "has failed and does not run",
    End.UNKNOWN: "does not run; how it ended is not known",
}

_WORTH: Final = 0.01
"""A cause that takes less of the wall clock is not worth an advice."""


def name_of(ledger: Ledger) -> str:
    """Return the short name of a run: the last part of its place."""
    return one_line(ledger.url.rstrip("/").rpartition("/")[2] or ledger.url, most=80)


def state(ledger: Ledger) -> str:
    """Say in one sentence how the run is: running or not, how far, on what."""
    if not ledger.generations:
        return f"{name_of(ledger)} has not trained yet: no generation has begun."
    last = ledger.generations[-1]
    where = count(last.world_size, "rank")
    where += f" ({count(len(last.hosts), 'host')})" if last.hosts else ""
    step = f"step {number(ledger.step)}"
    if last.end is End.RUNNING:
        return f"{name_of(ledger)} is training: {step}, in generation {last.generation}, on {where}."
    return f"{name_of(ledger)} {_ENDS[last.end]}: {step}, after {count(len(ledger.generations), 'generation')}."


def about(failure: str) -> About:
    """Return what is known of a class of failures; of a word that is none, what is known of ``unknown``."""
    try:
        return ABOUT[FailureClass(failure)]
    except ValueError:
        return ABOUT[FailureClass.UNKNOWN]


def failure(incident: Incident) -> str:
    """Return a failure by its title and its class: ``fault of an accelerator (device-hardware)``."""
    return f"{about(incident.failure).title} ({one_line(incident.failure, most=40)})"


def fault(incident: Incident) -> str:
    """Say who can mend it."""
    if incident.failure == FailureClass.UNKNOWN:
        return "not known"
    return OWNERS[about(incident.failure).owner]


def confidence(incident: Incident) -> str:
    """Return how sure the verdict is; of a failure that no rule knows, how sure the rank is."""
    sure = one_line(incident.confidence, most=40) or "not known"
    return f"the rank is {sure}" if incident.failure == FailureClass.UNKNOWN else sure


def fault_brief(incident: Incident) -> str:
    """Say who can mend it, in a word."""
    known = {Owner.USER: "program", Owner.PLATFORM: "platform", Owner.EITHER: "not settled"}
    return "not known" if incident.failure == FailureClass.UNKNOWN else known[about(incident.failure).owner]


def where(incident: Incident) -> str:
    """Return the rank and the node at which it began."""
    rank = "no single rank" if incident.rank is None else f"rank {incident.rank}"
    return rank if incident.node is None else f"{rank} on {one_line(incident.node, most=80)}"


def done(action: str) -> str:
    """Return what was done about a failure."""
    try:
        return _DONE[Action(action)]
    except ValueError:
        return one_line(action) or "nothing is known to have been done"


def came_back(incident: Incident) -> str:
    """Return from where a run came back after a failure: the step, and the tier or the store."""
    if incident.resumed_step is None:
        return "it has not come back from it, or began afresh"
    return f"step {number(incident.resumed_step)}{_from(incident.sources)}"


def _from(sources: Sequence[tuple[str, int]]) -> str:
    return f", read from {origins(sources)}" if sources else ", from where is not recorded"


def origins(sources: Sequence[tuple[str, int]]) -> str:
    """Return where bytes came from: ``memory of the nodes (4.6 GiB)``, with shares if there are several."""
    total = sum(nbytes for _, nbytes in sources)
    several = len(sources) > 1 and total > 0
    shown = [
        f"{source(name)} ({f'{percent(nbytes / total)} of ' if several else ''}{sizes.in_words(nbytes)})"
        for name, nbytes in sorted(sources, key=lambda each: -each[1])
    ]
    return join(shown) or "nowhere: nothing was read"


def source(name: str) -> str:
    """Return a tier or a store for people."""
    if name == "memory":
        return "memory of the node"
    if name == "memory of another node":
        return name
    return "the store" if name == "store" else one_line(name, most=120)


def costs(parts: Parts) -> str:
    """Return the parts of a cost, the largest first: ``lost work 2 min 5 s, detection 8 s``."""
    ordered = sorted(((seconds, part) for part, seconds in parts.items() if seconds > 0), reverse=True)
    return ", ".join(f"{part} {duration(seconds)}" for seconds, part in ordered) or "nothing"


def stake(now: Stake) -> str:
    """Say what would be lost with a process, a node or the job, if it happened now."""
    if now.step is None:
        return "everything: nothing is saved yet"
    lost = "" if now.lost_s is None else f"{duration(now.lost_s)} of work, "
    return f"{lost}the steps since {number(now.step)} (back from {source(now.source)})"


def saved_step(ledger: Ledger) -> int | None:
    """Return the newest committed step; None if there is none.

    The store knows of it before the ranks have written that down, so what is at stake may be ahead of the saves.
    """
    known = [one.step for one in ledger.saves if one.commit_s is not None]
    known += [one.step for one in ledger.stakes if one.what == "the job" and one.step is not None]
    return max(known, default=None)


def badput(ledger: Ledger) -> list[tuple[Part, float]]:
    """Return what was not training, the largest first, in seconds."""
    lost = [(part, seconds) for part, seconds in ledger.parts.items() if part not in PRODUCTIVE and seconds > 0]
    return sorted(lost, key=lambda each: -each[1])


def interval_s(ledger: Ledger) -> float | None:
    """Return the usual time between two saves of one generation, in seconds; None if there are no two."""
    gaps = [
        later.at_s - earlier.at_s
        for earlier, later in zip(ledger.saves, ledger.saves[1:], strict=False)
        if later.generation == earlier.generation
    ]
    return statistics.median(gaps) if gaps else None


def speed(ledger: Ledger) -> float | None:
    """Return steps a second of the newest generation, while it was training; None if it has not taken one."""
    if not ledger.generations:
        return None
    last = ledger.generations[-1]
    taken = last.last_step - (last.resumed_step or 0)
    seconds = sum(last.parts.get(part, 0.0) for part in (*PRODUCTIVE, Part.SAVE))
    return taken / seconds if taken > 0 and seconds > 0 else None


def advice(ledger: Ledger) -> tuple[str, ...]:
    """Say what to change, that which gains the most first; at least one sentence.

    From the largest causes of lost time, then from failures that come back, then from what a step waits for.
    """
    wall_s = ledger.wall_s
    if wall_s <= 0:
        return ("Nothing yet: there is no time to account for.",)
    found = []
    for part, seconds in badput(ledger)[:3]:
        if seconds / wall_s >= _WORTH:
            took = f"{part} took {duration(seconds)}, {percent(seconds / wall_s)} of the time"
            found.append(f"{_ADVICE[part]} ({took}).{_detail(ledger, part)}")
    mending = _mending(ledger)
    # A job that is down gains nothing by anything else before that.
    found = [*mending, *found, *_repeated(ledger)] if _is_down(ledger) else [*found, *_repeated(ledger), *mending]
    found += _waits(ledger)
    if not found:
        return (f"Nothing: {percent(ledger.ettr)} of the time went into steps that were kept.",)
    return tuple(found)


_ADVICE: Final[dict[Part, str]] = {
    Part.LOST: "Save more often, or keep the newest state in the memory of the nodes with `tiers=['memory']`",
    Part.SAVE: "Save less often (`every='auto'`), or find out why saves hold training up: overlap off, a slow disk",
    Part.RESTORE: "Restore from nearer: `tiers=['memory']`, with `peer_copies=1` where nodes get lost",
    Part.START: "Start faster: keep compiled kernels, data indexes and the environment on the nodes between starts",
    Part.DETECTION: "Notice failures sooner: let hangs end the job (`on_hang`), and lower the timeouts of the launcher",
    Part.REFORMATION: "Meet again sooner: keep spare nodes, or go on with fewer (`resilient run --nodes MIN:MAX`)",
    Part.IDLE: "Have the job started again at once: requeue it at exit code 75, or allow more restarts",
}


def _detail(ledger: Ledger, part: Part) -> str:
    """Return what the account says beside the advice itself, where it has figures for it."""
    if part is Part.LOST and ledger.incidents:
        usual_s = interval_s(ledger)
        each_s = ledger.parts[part] / len(ledger.incidents)
        between = "" if usual_s is None else f"; saves are {duration(usual_s)} apart"
        average = f" A failure throws away {duration(each_s)} on average{between}."
        return f"{average} `resilient plan --from` finds the best interval."
    if part is Part.SAVE and ledger.saves:
        stalls = [save.stall_s for save in ledger.saves]
        return f" A save holds training up for {duration(statistics.fmean(stalls))} on average."
    return ""


def _repeated(ledger: Ledger) -> list[str]:
    """Return advice from what has failed more than once, in the same way or at the same node."""
    nodes = Counter(
        incident.node
        for incident in ledger.incidents
        if incident.node is not None and about(incident.failure).owner is not Owner.USER
    )
    return [
        f"Have node {one_line(node, most=80)} examined (`resilient check`): {count(times, 'failure')} began there."
        for node, times in nodes.most_common(2)
        if times > 1
    ]


def _mending(ledger: Ledger) -> list[str]:
    last = ledger.incidents[-1] if ledger.incidents else None
    if last is None or last.failure == FailureClass.UNKNOWN:
        return []
    return [f"After the last failure, {failure(last)}: {about(last.failure).remedy}."]


def _is_down(ledger: Ledger) -> bool:
    return bool(ledger.generations) and ledger.generations[-1].end is End.FAILED


def no_stake(ledger: Ledger) -> str:
    """Say why an account knows nothing of what would be lost now."""
    complete = ledger.generations and ledger.generations[-1].end is End.DONE
    return "nothing: the run is complete" if complete else "not recorded"


def _waits(ledger: Ledger) -> list[str]:
    productive_s = sum(ledger.parts.get(part, 0.0) for part in PRODUCTIVE)
    found = []
    if productive_s > 0:
        data, exchange = (ledger.parts.get(part, 0.0) / productive_s for part in (Part.DATA, Part.EXCHANGE))
        if data > 0.1:
            found.append(
                f"Give the loader more workers or faster storage: steps wait for data {percent(data)} of their time."
            )
        if exchange > 0.3:
            found.append(
                f"Look at the links between ranks, or overlap more: exchange takes {percent(exchange)} of the steps."
            )
    return found


def promise(ledger: Ledger) -> str:
    """Say whether the promised share of productive time is delivered; empty if none was promised."""
    if ledger.promise is None:
        return ""
    kept = "kept" if ledger.promise.delivered >= ledger.promise.promised else "missed"
    largest = "" if ledger.promise.largest is None else f"; most of the rest went into {ledger.promise.largest}"
    return (
        f"promise {kept}: {percent(ledger.promise.delivered)} delivered of {percent(ledger.promise.promised)} promised"
        f"{largest if kept == 'missed' else ''}"
    )


def proof(incident: Incident) -> tuple[str, ...]:
    """Return the lines that prove a failure, as they can be shown."""
    return tuple(printable(line) for line in incident.proof)
