"""The classes of failures: whose each is, and what is done about it the first time, the second time, and then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class FailureClass(StrEnum):
    """What has failed: append-only, stable across releases, printed by ``resilient why --json``."""

    USER_ERROR = "user-error"
    ACCELERATOR_OOM = "accelerator-oom"
    HOST_OOM = "host-oom"
    SHARED_MEMORY = "shared-memory"
    DEVICE_ASSERT = "device-assert"
    DEVICE_HARDWARE = "device-hardware"
    DEVICE_DRIVER = "device-driver"
    NETWORK = "network"
    PEER_DIED = "peer-died"
    HANG = "hang"
    FROZEN = "frozen"
    NODE_LOST = "node-lost"
    COORDINATOR_LOST = "coordinator-lost"
    STORAGE = "storage"
    BAD_CHECKPOINT = "bad-checkpoint"
    NUMERICS = "numerics"
    SILENT_CORRUPTION = "silent-corruption"
    STRAGGLER = "straggler"
    PREEMPTION = "preemption"
    CANCELLED = "cancelled"
    CRASH_LOOP = "crash-loop"
    UNKNOWN = "unknown"


class Owner(StrEnum):
    """Who can mend it."""

    USER = "user"
    PLATFORM = "platform"
    EITHER = "either"


class Action(StrEnum):
    """What is done about a failure."""

    RETRY = "retry"  # in place, without a diagnosis
    RESTART = "restart"  # on the same nodes
    EXCLUDE_NODE = "exclude-node"  # and restart without it
    FALL_BACK = "fall-back"  # restart from an older checkpoint
    STOP = "stop"  # and tell the user


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A class: ``ladder`` is what is done at the first, second, ... failure of it in a row without progress."""

    title: str
    owner: Owner
    ladder: tuple[Action, ...]
    remedy: str
    spends: bool = True  # whether it uses up a budget


_R, _N, _X, _F, _S = Action.RETRY, Action.RESTART, Action.EXCLUDE_NODE, Action.FALL_BACK, Action.STOP


def _about(title: str, owner: str, ladder: tuple[Action, ...], remedy: str, *, spends: bool = True) -> About:
    return About(title=title, owner=Owner(owner), ladder=ladder, remedy=remedy, spends=spends)


ABOUT: Final[dict[FailureClass, About]] = {
    FailureClass.USER_ERROR: _about("error of the program", "user", (_N, _S), "mend what the traceback shows"),
    FailureClass.ACCELERATOR_OOM: _about(
        "out of memory on the accelerator", "user", (_N, _S), "use a smaller micro-batch, or shard more of the state"
    ),
    FailureClass.HOST_OOM: _about(
        "out of memory on the host", "user", (_N, _S), "use fewer loader workers, or ask for more memory"
    ),
    FailureClass.SHARED_MEMORY: _about(
        "not enough shared memory",
        "user",
        (_S,),
        "make /dev/shm larger (docker: --shm-size), or use fewer loader workers",
    ),
    FailureClass.DEVICE_ASSERT: _about(
        "error of a kernel on the accelerator",
        "either",
        (_N, _X, _S),
        "run with CUDA_LAUNCH_BLOCKING=1 to see which call it is",
    ),
    FailureClass.DEVICE_HARDWARE: _about("fault of an accelerator", "platform", (_X,), "have the device replaced"),
    FailureClass.DEVICE_DRIVER: _about(
        "fault of a driver", "platform", (_N, _X), "have the device reset, or the node rebooted"
    ),
    FailureClass.NETWORK: _about(
        "fault of the network", "platform", (_R, _X), "look at the counters of the node's links"
    ),
    FailureClass.PEER_DIED: _about("another rank was gone", "either", (_N,), "look for what that rank has left"),
    FailureClass.HANG: _about("no progress", "either", (_N, _X), "look at the stacks of the rank that is named"),
    FailureClass.FROZEN: _about(
        "a process that is stopped", "either", (_N, _X), "look who stops it, and for tasks in state D"
    ),
    FailureClass.NODE_LOST: _about("a node is gone", "platform", (_X,), "look whether the node is up"),
    FailureClass.COORDINATOR_LOST: _about(
        "the process that the ranks meet at is gone", "platform", (_N,), "look at the node that hosts it", spends=False
    ),
    FailureClass.STORAGE: _about(
        "fault of the storage", "platform", (_R, _N, _S), "look at the mount or the bucket, and its space"
    ),
    FailureClass.BAD_CHECKPOINT: _about(
        "a checkpoint cannot be used", "either", (_F,), "`resilient verify` says what is damaged"
    ),
    FailureClass.NUMERICS: _about(
        "loss or gradients are not finite",
        "user",
        (_N, _F, _S),
        "look at the data, the learning rate and the loss scale",
    ),
    FailureClass.SILENT_CORRUPTION: _about("replicas that differ", "platform", (_X,), "have the node tested"),
    FailureClass.STRAGGLER: _about(
        "a rank that is slow", "platform", (_R,), "look at clocks, throttling and PCIe links of the node"
    ),
    FailureClass.PREEMPTION: _about("the machine was taken away", "platform", (_N,), "start it again", spends=False),
    FailureClass.CANCELLED: _about("somebody has stopped it", "user", (_S,), "start it again to go on", spends=False),
    FailureClass.CRASH_LOOP: _about(
        "the same failure again and again", "either", (_S,), "look at the first of these failures"
    ),
    FailureClass.UNKNOWN: _about(
        "no rule knows it", "either", (_N, _X, _S), "look at the log of the rank that is named"
    ),
}
