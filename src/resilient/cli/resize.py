"""``resilient resize``: a running job that goes on with another number of nodes, asked through its store."""

from __future__ import annotations

import click

from resilient.catalog.requests import ask
from resilient.cli.render import json_option, say, say_json
from resilient.cli.stop import find_running, whole_run
from resilient.clock import SYSTEM_CLOCK


@click.command(epilog="Example: resilient resize s3://bucket/runs/gpt --nodes 6")
@click.argument("run")
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="With how many nodes the run is to go on.")
@click.option("--why", default="", help="For the log of the run, such as 'two nodes for another job'.")
@json_option
def resize(run: str, *, nodes: int, why: str, as_json: bool) -> None:
    """Ask the nodes that train in RUN to go on with this number of them, in the same job.

    All ranks save the same step; once it is committed, the agents of `torchrun --rdzv-backend=resilient` begin a new
    round with that many nodes. The others stay as spares, and end with the job. No completed step is lost. More nodes
    than there are: those that come later join. A job that another launcher has started does not know such requests.
    """
    place = whole_run(run, "resize")
    request = ask(place.store, "resize", nodes=nodes, why=why, clock=SYSTEM_CLOCK)
    if not as_json:
        say(f"{place.url} is asked to go on with {nodes} node{'s' * (nodes > 1)}: it saves first, then starts again")
    _, running = find_running(place)
    if as_json:
        say_json({"run": place.url, "request": "resize", "nodes": nodes, "launch": request.launch, "running": running})
