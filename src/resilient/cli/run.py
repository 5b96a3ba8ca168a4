"""``resilient run SCRIPT``: torchrun with the flags that surviving needs."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Final

import click

from resilient.cli.render import json_option, say, say_json, table
from resilient.config import Cluster, parse_duration, read_cluster, read_settings
from resilient.errors import ErrorKind, UsageError

_LAUNCHER: Final = "resilient.elastic.torchrun"
_NODES: Final = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_USUAL_GRACE_S: Final = 30.0
_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of torchrun: ``value`` is None for one that takes none; ``why`` is for people."""

    name: str
    value: str | None
    why: str

    @property
    def word(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the command was asked for."""

    store: str | None
    nodes: str | None
    nproc_per_node: str | None
    grace: str | None
    max_restarts: int
    job: str | None
    check: str


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: resilient run --store s3://bucket/run --nodes 2:4 train.py --lr 1e-4",
)
@click.option("--store", metavar="URL", help="A place that all nodes share, where they find each other: the run's own.")
@click.option("--nodes", metavar="N|MIN:MAX", help="How many nodes; by default what SLURM says, else 1.")
@click.option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="Workers of a node; by default one for each GPU.")
@click.option("--grace", metavar="TIME", help='Between the notice of a stop and the end by force, such as "2min"; 30s.')
@click.option("--max-restarts", type=click.IntRange(0), default=100, show_default=True, help="Of one node's workers.")
@click.option("--id", "job", metavar="ID", help="The job's name, the same on all nodes; by default SLURM's job id.")
@click.option(
    "--check",
    type=click.Choice(["light", "off"]),
    default="light",
    show_default=True,
    help="Examine this node before it joins, and after each attempt.",
)
@click.option(
    "--torchrun", "more", metavar="FLAG", multiple=True, help="One more flag of torchrun: --torchrun=--tee=3."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--dry-run", is_flag=True, help="Show the command and why each flag is there; start nothing.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    more: tuple[str, ...],
    module: bool,
    dry_run: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
    **wished: object,
) -> None:
    """Start SCRIPT on this node as one of the nodes of a job; the same command on each node.

    Becomes torchrun, with the flags that a job needs which survives the loss of a node, takes in a late one, and saves
    when it is told to stop. Exit codes: 0 done, 75 stopped with its state saved ("start me again"), else torchrun's.
    """
    flags = flags_of(Wish(**wished), read_cluster())  # type: ignore[arg-type]  # click has checked them
    words = [flag.word for flag in flags] + list(more) + (["-m"] if module else [])
    command = [sys.executable, "-m", _LAUNCHER, *words, script, *arguments]
    if as_json and not dry_run:
        raise UsageError(
            "--json goes with --dry-run", kind=ErrorKind.INVALID_ARGUMENT, hint="the script has its own output"
        )
    if not dry_run:
        sys.stdout.flush()
        os.execv(command[0], command)  # noqa: S606 -- no shell: signals have to reach torchrun, and once each
    if as_json:
        say_json({"command": command, "flags": [asdict(flag) for flag in flags]})
        return
    say(shlex.join(command))
    say("")
    table(("flag of torchrun", "value", "why"), [(flag.name, flag.value or "", flag.why) for flag in flags])


def flags_of(wish: Wish, cluster: Cluster) -> list[Flag]:
    """Return the flags of torchrun for a node of this job.

    Raises:
        UsageError: something does not fit together; nothing was started.
    """
    if cluster.local_task:
        raise UsageError(
            f"this is task {cluster.local_task} of its node, and the workers of a node are started by one task",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="srun --ntasks-per-node=1 resilient run …; the number of workers is --nproc-per-node",
        )
    least, most = _nodes(wish.nodes, cluster)
    flags = [
        Flag(name="--nnodes", value=f"{least}:{most}", why=_why_nodes(wish, cluster, least, most)),
        _workers(wish.nproc_per_node, cluster),
        *_rendezvous(wish, cluster, most),
    ]
    flags += [_signals(), _grace(wish.grace)]
    return [
        *flags,
        Flag(name="--monitor-interval", value="0.1", why="seconds between two looks at the workers"),
        Flag(
            name="--max-restarts",
            value=str(wish.max_restarts),
            why="restarts of this node's workers; the same failure at the same step ends the run much earlier",
        ),
    ]


def _nodes(text: str | None, cluster: Cluster) -> tuple[int, int]:
    if text is None:
        return (cluster.nodes or 1,) * 2
    match = _NODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nodes is {text!r}: it must be N or MIN:MAX", kind=ErrorKind.INVALID_ARGUMENT)
    return least, most


def _why_nodes(wish: Wish, cluster: Cluster, least: int, most: int) -> str:
    if wish.nodes is None and cluster.nodes is not None:
        return "all that SLURM gave; --nodes MIN:MAX goes on with fewer"
    return "as asked" if least == most else "starts and goes on with at least so many; more become spares"


def _workers(text: str | None, cluster: Cluster) -> Flag:
    name = "--nproc-per-node"
    if text is not None:
        return Flag(name=name, value=text, why="as asked")
    if cluster.gpus_per_node is not None:
        return Flag(name=name, value=str(cluster.gpus_per_node), why="the GPUs that SLURM gave on this node")
    return Flag(name=name, value="auto", why="one worker for each GPU; without any, for each processor")


def _rendezvous(wish: Wish, cluster: Cluster, most: int) -> list[Flag]:
    if wish.store is None:
        if most > 1:
            raise UsageError(
                f"{most} nodes need a place where they find each other",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="give the place of the run: --store s3://bucket/run, or a directory on a shared file system",
            )
        return [
            Flag(name="--standalone", value=None, why="one node, which has nobody to find; --store makes it elastic")
        ]
    flags = [
        Flag(name="--rdzv-backend", value="resilient", why="nodes may come late or be lost, the first one included"),
        Flag(
            name="--rdzv-endpoint", value=wish.store, why="nodes find each other in the store: no host has to live on"
        ),
        Flag(name="--rdzv-id", value=wish.job or cluster.job or "resilient", why="names the job, on all nodes alike"),
    ]
    if wish.check != "off":
        why = "some seconds before joining: a sick node would spoil the work of all; --check off joins unseen"
        flags.append(Flag(name="--rdzv-conf", value=f"check={wish.check}", why=why))
    if cluster.address is not None:
        flags.append(Flag(name="--local-addr", value=cluster.address, why="POD_IP: other pods may not resolve names"))
    return flags


def _signals() -> Flag:
    # Under nohup a terminal that closes is to end nothing; torchrun would take the signal back.
    handled = [name for name in _SIGNALS if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN]
    why = "a notice goes on to the workers; SIGUSR1 of SLURM would else end torchrun and leave the workers behind"
    return Flag(name="--signals-to-handle", value=",".join(handled), why=why)


def _grace(text: str | None) -> Flag:
    name = "--shutdown-timeout"
    if text is None:
        seconds, why = read_settings().grace_s, "grace_s of the settings"
        if seconds is None:
            seconds, why = _USUAL_GRACE_S, "seconds after a notice until force; say --grace if there are more"
    else:
        try:
            seconds, why = parse_duration(text), "seconds after a notice until force, as asked"
        except ValueError as error:
            raise UsageError(f"--grace is {text!r}: it {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
    return Flag(name=name, value=str(math.ceil(seconds)), why=why)
