"""Whether ``/dev/shm`` is large enough: loader workers hand every batch through it."""

from __future__ import annotations

import os
from typing import Final

from resilient.check.context import Context
from resilient.check.limits import GIB, Limits
from resilient.check.result import Result, Status, failed
from resilient.format import sizes

NAME: Final = "/dev/shm"  # noqa: S108 -- the very place that is meant


def check(context: Context) -> list[Result]:
    try:
        state = os.statvfs(context.path("dev", "shm"))
    except FileNotFoundError:
        return [failed(NAME, "there is none", "mount one: mount -t tmpfs -o size=16g tmpfs /dev/shm")]
    return [judge(state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize, context.limits)]


def judge(total: int, free: int, limits: Limits) -> Result:
    """Judge a size in bytes. Docker and Kubernetes give 64 MB if not told otherwise."""
    line = f"{sizes.in_words(free)} of {sizes.in_words(total)} are free"
    remedy = ""
    if total < limits.shm_nbytes:
        line = f"has only {sizes.in_words(total)}: loader workers and copies of states will die of SIGBUS"
        remedy = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
    elif free < limits.shm_nbytes:
        line, remedy = f"only {line}", "remove what ended processes left there (ls -l /dev/shm), or enlarge it"
    return Result(
        name=NAME,
        status=Status.FAILED if remedy else Status.OK,
        line=line,
        remedy=remedy,
        figure=(total if total < limits.shm_nbytes else free) / GIB,
        unit="GiB",
        limit=limits.shm_nbytes / GIB,
    )
