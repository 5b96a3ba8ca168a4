"""``resilient doctor URL``: whether a store can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from resilient.catalog.doctor import Finding, examine
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
    store breaks a promise (G1, G2, … of the documentation) that this package makes. A store that cannot decide between
    two writers is none of these: it works for one launch at a time, and the report says what it cannot guarantee.
    """
    store = open_store(url)
    try:
        # Opened by its URL once more: `memory://` is the same one then, and everything else has its own connections.
        findings = examine(store, reopen=lambda: open_store(url))
    finally:
        store.close()
    bad = [finding for finding in findings if not finding.ok]
    limited = [finding for finding in findings if finding.limited]
    if as_json:
        say_json({"url": store.url, "ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(_result(each), each.name, each.detail) for each in findings]
        table(("result", "check", "detail"), rows)
        if bad:
            note(f"{store.url} does not keep {_promises(bad)}: no run is safe there", kind="error")
        elif limited:
            say(f"{store.url} can be trusted with one launch of a run at a time")
            note(f"{store.url} cannot guarantee {_promises(limited)} if several run at once")
        else:
            say(f"{store.url} can be trusted")
    if bad:
        ctx.exit(StoreError.exit_code)


def _result(finding: Finding) -> str:
    if finding.ok:
        return f"limits {finding.promise}" if finding.limited else "ok"
    return f"breaks {finding.promise}"


def _promises(findings: Sequence[Finding]) -> str:
    return ", ".join(sorted({finding.promise for finding in findings}))
