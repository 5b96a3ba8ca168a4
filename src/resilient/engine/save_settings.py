"""How saves are made."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.config import Settings, parse_bandwidth
from resilient.engine.peers import Peers
from resilient.format.documents import Claim
from resilient.policy.keep import Keep
from resilient.store.base import Store
from resilient.writer.messages import Open, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How saves are made.

    ``chunk_nbytes``: the largest piece with a digest of its own. ``commit_timeout_s``: from the boundary to the commit.
    ``agree_timeout_s``: for the ranks to find out that they hold the same tensors, when those are new. ``keep``: what
    retention leaves; None deletes nothing. ``compress`` and ``max_bandwidth`` (bytes per second): of the uploads.
    ``staging_slots``: how many states the arena holds, 1 or 2; None: 2 if there is memory for them. ``local_ranks``:
    how many ranks share this host's memory and processors. ``tiers``: of this node, for every save;
    ``copies``: of the first one, on another node.
    """

    chunk_nbytes: int = 4 << 20
    commit_timeout_s: float = 600.0
    agree_timeout_s: float = 30.0
    keep: Keep | None = None
    compress: str = "auto"
    max_bandwidth: float | None = None
    staging_slots: int | None = None
    local_ranks: int = 1
    tiers: tuple[Tier, ...] = ()
    copies: bool = False


def save_settings(
    settings: Settings, keep: Keep | None, local_ranks: int, tiers: tuple[Tier, ...] = ()
) -> SaveSettings:
    """Return what a user's settings mean for saves."""
    return SaveSettings(
        chunk_nbytes=settings.chunk_nbytes,
        commit_timeout_s=settings.commit_timeout_s,
        keep=keep,
        compress=settings.compress,
        max_bandwidth=None if settings.max_bandwidth is None else parse_bandwidth(settings.max_bandwidth),
        staging_slots=None if settings.staging_slots == "auto" else int(settings.staging_slots),
        local_ranks=local_ranks,
        tiers=tiers,
        copies=bool(tiers) and settings.peer_copies > 0,
    )


def opening(store: Store, claim: Claim, peers: Peers, settings: SaveSettings, *, run_id: str) -> Open:
    """Return what a writer of this rank is told first."""
    return Open(
        url=store.url,
        options={},  # what the store was opened with is for `Writers` to find out
        run_id=run_id,
        rank=peers.rank,
        world_size=peers.world_size,
        generation=claim.generation,
        nonce=claim.nonce,
        commit_timeout_s=settings.commit_timeout_s,
        keep=settings.keep,
        compress=settings.compress,
        max_bandwidth=settings.max_bandwidth,
        tiers=settings.tiers,
        copies=settings.copies,
    )
