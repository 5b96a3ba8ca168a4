"""``resilient stop``: a running job that saves and ends, asked through the place where its checkpoints are."""

from __future__ import annotations

import click

from resilient.catalog.generations import newest_claim
from resilient.catalog.launch import claimant_lives
from resilient.catalog.requests import ask
from resilient.cli.place import Place, open_own
from resilient.cli.render import json_option, note, say, say_json
from resilient.clock import SYSTEM_CLOCK, Deadline
from resilient.config import parse_duration
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.format.documents import Claim


@click.command(epilog="Example: resilient stop s3://bucket/runs/gpt --why 'maintenance at noon' --wait")
@click.argument("run")
@click.option("--why", default="", help="For the log of the run, such as 'node 7 is drained'.")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
@click.option("--timeout", default="15min", show_default=True, help="For how long to wait, such as 90s.")
@json_option
def stop(run: str, *, why: str, wait: bool, timeout: str, as_json: bool) -> None:
    """Ask whoever trains in RUN to stop: all ranks save the same step, and end with exit code 75 ("start me again").

    Works from anywhere that can write to RUN. The training sees it within a few seconds, ends the step that goes on,
    and waits for the commit of its state. No step is lost, and the next start goes on from there. What is started later
    does not stop because of it.
    """
    timeout_s = _seconds(timeout)
    place = whole_run(run, "stop")
    request = ask(place.store, "stop", why=why, clock=SYSTEM_CLOCK)
    if not as_json:
        say(f"{place.url} is asked to stop: it saves after the step that goes on, and ends with exit code 75")
    claim, running = find_running(place)
    ended = _wait(place, claim, timeout_s) if wait and running and claim is not None else None
    if as_json:
        say_json({"run": place.url, "request": "stop", "launch": request.launch, "running": running, "ended": ended})
    elif ended:
        say("it has ended")


def whole_run(run: str, command: str) -> Place:
    """Return a run that can be asked something: not one step of it, and nothing of another library's."""
    place = open_own(run)
    if place.step is not None:
        raise UsageError(f"{command} takes a run, not one step of it", kind=ErrorKind.INVALID_ARGUMENT)
    return place


def find_running(place: Place) -> tuple[Claim | None, bool]:
    """Return the newest generation, and whether its launch seems to live; tell people if it does not."""
    claim = newest_claim(place.store)
    running = claim is not None and claim.heartbeat and claimant_lives(place.store, claim, SYSTEM_CLOCK)
    if not running:
        note(f"nothing seems to be running in {place.url}; what is started later does not heed the request")
    return claim, running


def _wait(place: Place, claim: Claim, timeout_s: float) -> bool:
    deadline = Deadline(SYSTEM_CLOCK, timeout_s)
    while claimant_lives(place.store, claim, SYSTEM_CLOCK):
        if deadline.expired:
            raise StoreError(
                f"{place.url} still runs after {timeout_s:g} s",
                kind=ErrorKind.DEADLINE,
                hint="it has been asked, and stops at the end of a step; look at its log",
                retryable=True,
            )
        SYSTEM_CLOCK.sleep(min(1.0, max(0.01, deadline.remaining_s)))
    return True


def _seconds(timeout: str) -> float:
    try:
        return parse_duration(timeout)
    except ValueError as error:
        raise UsageError(f"--timeout {timeout!r} {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
