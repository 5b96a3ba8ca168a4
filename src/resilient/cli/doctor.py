"""``resilient doctor URL``: whether a store can be trusted."""

from __future__ import annotations

from dataclasses import asdict

import click

from resilient.catalog.doctor import examine
from resilient.cli.render import json_option, note, say, say_json, table
from resilient.errors import StoreError
from resilient.store.open import open_store


@click.command(epilog="Example: resilient doctor s3://bucket/runs")
@click.argument("url")
@json_option
@click.pass_context
def doctor(ctx: click.Context, url: str, *, as_json: bool) -> None:
    """Find out whether the store at URL keeps what saving and resuming rest on.

    Everything that is written for that lies under URL/control/ and is removed again. Ends with exit code 13 if the
    store breaks a promise (G1, G2, … of the documentation) that this package makes.
    """
    store = open_store(url)
    try:
        findings = examine(store)
    finally:
        store.close()
    bad = [finding for finding in findings if not finding.ok]
    if as_json:
        say_json({"url": store.url, "ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [("ok" if each.ok else f"breaks {each.promise}", each.name, each.detail) for each in findings]
        table(("result", "check", "detail"), rows)
        if bad:
            promises = ", ".join(sorted({finding.promise for finding in bad}))
            note(f"{store.url} does not keep {promises}: no run is safe there", kind="error")
        else:
            say(f"{store.url} can be trusted")
    if bad:
        ctx.exit(StoreError.exit_code)
