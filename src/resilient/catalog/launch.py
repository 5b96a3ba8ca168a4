"""Whether another start of the job is alive in the same run."""

from __future__ import annotations

from typing import Final

from resilient.catalog.beat import Beating, is_alive, read_sign
from resilient.catalog.generations import newest_number, read_claim
from resilient.catalog.once import exists
from resilient.catalog.process import lives
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ConflictError, ErrorKind
from resilient.format import layout
from resilient.format.documents import Claim
from resilient.store.base import Store

INTERVAL_S: Final = 5.0
"""How often a launch shows that it lives; a launch on another machine is held for dead after three silent intervals."""

_RECENT: Final = 3
"""Launches of which one may still be restarted by whoever started it."""


class Heartbeat(Beating):
    """Shows in the store that this launch lives, until it is closed."""

    def __init__(self, store: Store, launch: str, interval_s: float = INTERVAL_S, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(store, layout.heartbeat(launch), interval_s=interval_s, clock=clock, remove=False)


def check_no_other_launch(store: Store, *, launch: str, takeover: bool, clock: Clock) -> None:
    """Return if this launch may claim a generation; call it before every claim.

    The launch of the newest claim is the one that counts. On the same machine its process is looked up; on another
    one its heartbeat is watched, for three of its intervals at most. Bare saves write no heartbeat and are not waited
    for.

    Args:
        store: the run.
        launch: names this start of the job; its restarts bear the same name.
        takeover: start although another launch is alive. That one then stops claiming.
        clock: to wait with.

    Raises:
        ConflictError: kind ``run-in-use``: another launch is alive; its host and process are named. Kind
            ``taken-over``: this launch has run before, and another one has claimed since.
    """
    newest = _newest_with_heartbeat(store)
    if newest is None or newest.launch == launch:
        return
    who = f"process {newest.pid} on {newest.host} (generation {newest.generation}, since {newest.created})"
    if exists(store, layout.heartbeat(launch)):
        raise ConflictError(
            f"{store.url}: this launch was taken over by {who}",
            kind=ErrorKind.TAKEN_OVER,
            hint="start the job anew if it should go on here",
        )
    if not takeover and claimant_lives(store, newest, clock):
        raise ConflictError(
            f"{store.url} is in use by {who}",
            kind=ErrorKind.RUN_IN_USE,
            hint="stop that one, or start a run with takeover=True: it will then save no more",
        )


def remove_dead_launches(store: Store, clock: Clock) -> int:
    """Remove the signs of launches that are over; return how many.

    A launch that was taken over knows it by its own sign, so those that may still start again stay: the newest few,
    and whatever has moved within three intervals.
    """
    listed = {key for key in store.list(layout.CONTROL) if key.startswith(layout.heartbeat(""))}
    old = listed - {layout.heartbeat(launch) for launch in _recent(store)}
    signs = {key: sign for key in old if (sign := read_sign(store, key)) is not None}
    known = {key: lives(sign.host, sign.pid, sign.process_started) for key, sign in signs.items()}
    dead = {key for key, alive in known.items() if alive is False or signs[key].ended}
    elsewhere = {key for key, alive in known.items() if alive is None} - dead
    if elsewhere:
        clock.sleep(3 * max(signs[key].interval_s for key in elsewhere))
        dead |= {key for key in elsewhere if read_sign(store, key) == signs[key]}
    for key in dead:
        store.delete(key)
    return len(dead)


def _recent(store: Store) -> set[str]:
    """Return the launches of the newest claims; all there are, unless there are more than a few."""
    launches: set[str] = set()
    for generation in range(newest_number(store), 0, -1):
        claim = read_claim(store, generation)
        if claim is not None and claim.heartbeat:
            launches.add(claim.launch)
        if len(launches) >= _RECENT:
            break
    return launches


def _newest_with_heartbeat(store: Store) -> Claim | None:
    for generation in range(newest_number(store), 0, -1):
        claim = read_claim(store, generation)
        if claim is not None and claim.heartbeat:
            return claim
    return None


def claimant_lives(store: Store, claim: Claim, clock: Clock) -> bool:
    """Say whether the launch of a claim is alive; takes three of its intervals if that is another machine's."""
    # The process first: it may have claimed and not yet shown its first sign, or have been killed before it could.
    key = layout.heartbeat(claim.launch)
    sign = read_sign(store, key)
    if sign is not None and sign.ended:
        return False  # the process may live on: a notebook, or a program that trains one run after another
    claimant = lives(claim.host, claim.pid, claim.process_started)
    if claimant is None or (not claimant and sign is not None):
        return is_alive(store, key, clock, interval_s=INTERVAL_S)
    return claimant
