"""How a run starts: the process group, the place, one generation for all ranks, and a sign of life."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from resilient.catalog.generations import claim_generation
from resilient.catalog.launch import Heartbeat, check_no_other_launch
from resilient.catalog.process import host, started
from resilient.catalog.run_info import open_run
from resilient.clock import Clock
from resilient.config import Process, Settings
from resilient.elastic.node import Node
from resilient.engine.key_values import TorchValues
from resilient.engine.leftovers import await_leftovers
from resilient.engine.meeting import meet
from resilient.engine.peers import Peers
from resilient.engine.same_place import check_same_place
from resilient.engine.tiers.places import NO_TIERS, NodeTiers, open_tiers
from resilient.errors import PeerError
from resilient.events import Bus, GenerationStarted
from resilient.format.digest import digest
from resilient.format.documents import Claim, decode_document, encode_document
from resilient.run.sections import Counter
from resilient.run.stopped import Stopped
from resilient.store.base import Store
from resilient.store.probe import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a run works with.

    ``created``: when the first generation of the run began, RFC 3339. ``local_ranks``: how many ranks are on this host.
    ``tiers``: of this node. ``late``: signals that came when it was too late for a stop. ``counter``: of the turns.
    """

    store: Store
    peers: Peers
    claim: Claim
    run_id: str
    created: str
    local_ranks: int
    tiers: NodeTiers = NO_TIERS
    late: list[int] = field(default_factory=list)
    counter: Counter = field(default_factory=Counter)


@contextmanager
def process_group(process: Process, settings: Settings) -> Iterator[None]:
    """Have a process group, if a launcher started this process; one that the program made itself is left alone."""
    if (process.world_size == 1 and process.master is None) or not dist.is_available() or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(process.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    # Workers that torchelastic restarts get the store of the dead ones, in which torch's own start-up would read
    # the dead ones' addresses and wait for them (torch 2.13): this life gets a part of the store of its own.
    store, rank, world_size = next(rendezvous("env://"))
    life = meet(TorchValues(store), rank, world_size, timeout_s=settings.peer_timeout_s)
    dist.init_process_group(backend, store=dist.PrefixStore(life, store), rank=rank, world_size=world_size)
    try:
        yield
    except Stopped as stopped:
        if stopped.together:  # as at a normal end; what is left of the group could abort the process (torch 2.13)
            dist.destroy_process_group()
        raise
    # Only at a normal end: after a failure the others may be gone, and taking leave of them could wait for ever.
    dist.destroy_process_group()


@contextmanager
def opened(store: Store, process: Process, settings: Settings, *, bus: Bus, clock: Clock) -> Iterator[Opened]:
    """Prove that a place can be used and that nobody else uses it, and start a generation there, alive until the end.

    Saves of an earlier life that its writers are still finishing are waited for.

    Raises:
        UsageError: the place is no run, or cannot be one; or the ranks do not share it.
        NotFoundError: nothing is there, and ``resume`` is "required".
        ConflictError: kind ``run-in-use``: another launch lives here.
        StoreError: the place cannot be used, found out within seconds.
    """
    peers = Peers.current()
    launch = _launch_id(process)

    def begin() -> bytes:
        probe(store)
        check_no_other_launch(store, launch=launch, takeover=settings.takeover, clock=clock)
        info = open_run(store, create=settings.resume != "required", clock=clock)
        claim = claim_generation(store, world_size=peers.world_size, launch=launch, heartbeat=True, clock=clock)
        return msgspec.msgpack.encode((encode_document(claim), info.run_id, info.created, store.url))

    shared = peers.share(peers.numbered("open"), begin, settings.peer_timeout_s)
    document, run_id, created, url = msgspec.msgpack.decode(shared, type=tuple[bytes, str, str, str])
    claim: Claim = decode_document(Claim, document, "the claim of this generation")
    check_same_place(store, claim, peers, made_in=url, timeout_s=settings.peer_timeout_s, clock=clock)
    heartbeat = Heartbeat(store, launch, settings.heartbeat_s, clock) if peers.rank == 0 else None
    if heartbeat is not None:
        heartbeat.start()
    try:
        if settings.resume != "never":
            await_leftovers(
                store,
                run_id,
                peers,
                generation=claim.generation,
                timeout_s=settings.commit_timeout_s,
                bus=bus,
                clock=clock,
            )
        yield Opened(
            store=store,
            peers=peers,
            claim=claim,
            run_id=run_id,
            created=created,
            local_ranks=process.local_world_size,
            tiers=open_tiers(run_id, settings.tiers, process, clock=clock),
        )
    finally:
        if heartbeat is not None:
            heartbeat.close()


def generation_started(opened: Opened, resumed_step: int | None) -> GenerationStarted:
    """Return what is told of a generation that has restored what it continues from."""
    return GenerationStarted(
        rank=opened.peers.rank,
        url=opened.store.url,
        generation=opened.claim.generation,
        world_size=opened.peers.world_size,
        resumed_step=resumed_step,
    )


def take_leave(opened: Opened, timeout_s: float) -> str | None:
    """Wait until no rank needs the others any more: one of them keeps the store through which they talk.

    Returns:
        Who has not come in time, in words; None if all have.
    """
    try:
        opened.peers.gather(f"end/{opened.claim.generation}-{opened.claim.nonce}", b"", timeout_s)
    except PeerError as error:
        return f"not every rank has come to the end: {error}"
    return None


def _launch_id(process: Process) -> str:
    """Name this start of the job: the same when torchelastic restarts the workers, another one at a new start."""
    if process.elastic_id is None:
        return uuid.uuid4().hex
    job = None if process.node_dir is None else Node(Path(process.node_dir)).job()
    if job is not None:
        return job  # the same on all nodes: any of them may have rank 0 in the next round
    # A user may give every start the same id. The agent, which outlives its workers, is the parent of this process.
    agent = os.getppid()
    return digest(f"{process.elastic_id} {host()} {agent} {started(agent)}".encode()).hex()
