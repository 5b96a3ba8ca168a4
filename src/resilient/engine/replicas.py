"""Whether what several ranks hold under one name is the same on all: found out at the start, not at the first save."""

from __future__ import annotations

import msgspec
import torch

from resilient.engine.division import is_plain
from resilient.engine.peers import Peers
from resilient.errors import ConflictError, ErrorKind
from resilient.format.digest import digest
from resilient.state.leaves import Captured
from resilient.state.tensors import flat


def check_replicas(captured: Captured, peers: Peers, *, timeout_s: float) -> None:
    """Compare plain tensors and values between the ranks; every rank calls this, when all of them are alive.

    A forgotten wrapper (DDP, FSDP) or a seed that differs by rank would else show only when a save is committed, after
    work that then cannot be saved. Reads every plain tensor once, at the speed of memory.

    Raises:
        ConflictError: kind ``divergent``, on all ranks alike; it names all that differs, and where.
    """
    if peers.world_size == 1:
        return
    mine = _digests(captured)
    summary = digest(msgspec.msgpack.encode(mine))
    if len(set(peers.gather(peers.numbered("replicas"), summary, timeout_s))) == 1:
        return
    # Ranks may hold different names (the stages of a pipeline): only what two of them share must agree.
    answers = peers.gather(peers.numbered("replicas"), msgspec.msgpack.encode(mine), timeout_s)
    first: dict[str, tuple[int, bytes]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, answer in enumerate(answers):
        for name, found in msgspec.msgpack.decode(answer, type=dict[str, bytes]).items():
            holder, known = first.setdefault(name, (rank, found))
            if known != found:
                different.setdefault(name, (holder, rank))
    if different:
        lines = [f"{name} differs between rank {one} and rank {two}" for name, (one, two) in different.items()]
        raise ConflictError(
            "\n  ".join(["the ranks hold different states under one name, so there is no one state to save:", *lines]),
            kind=ErrorKind.DIVERGENT,
            hint="wrap the module (DDP, FSDP) or broadcast it before run.track; what is each rank's own is "
            "declared: PerRank(item), or Shard(tensor, name, global_shape, offset) for a part of a larger tensor",
        )


def _digests(captured: Captured) -> dict[str, bytes]:
    found = {f"{leaf.item}.{leaf.name}": digest(leaf.data) for leaf in captured.values if leaf.rank is None}
    for tensor, local in zip(captured.tensors, captured.locals, strict=True):
        if is_plain(tensor) and tensor.alias is None:
            found[f"{tensor.item}.{tensor.name}"] = digest(_bytes_of(local))
    return found


@torch.no_grad()
def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return flat(tensor.cpu()).view(torch.uint8).numpy().data
