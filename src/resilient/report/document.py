"""The account as JSON: names that stay, seconds and bytes as numbers, times in RFC 3339 too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from resilient.report import words
from resilient.report.model import Incident, Ledger, MachineSeries, Part, Parts
from resilient.report.units import when


def as_json(ledger: Ledger) -> dict[str, Any]:
    """Return what ``resilient report --json`` prints; names are append-only (docs/report.md).

    Of the machines' samples there are count, least, mean and largest value: the samples themselves are in the journal.
    """
    document = {
        "run": ledger.url,
        "run_id": ledger.run_id,
        "began": _moment(ledger.began_s),
        "as_of": _moment(ledger.as_of_s),
        "began_s": ledger.began_s,
        "as_of_s": ledger.as_of_s,
        "wall_s": ledger.wall_s,
        "ettr": ledger.ettr,
        "step": ledger.step,
        "state": words.state(ledger),
        "parts": _parts(ledger.parts, everything=True),
        "generations": [
            asdict(one) | {"end": str(one.end), "hosts": list(one.hosts), "parts": _parts(one.parts)}
            for one in ledger.generations
        ],
        "incidents": [_incident(one) for one in ledger.incidents],
        "saves": [asdict(one) for one in ledger.saves],
        "restores": [asdict(one) | {"sources": _sources(one.sources)} for one in ledger.restores],
        "pictures": [asdict(one) for one in ledger.pictures],
        "machines": [_machine(one) for one in ledger.machines],
        "stakes": [asdict(one) for one in ledger.stakes],
        "notes": [asdict(one) for one in ledger.notes],
        "ettr_hours": [list(point) for point in ledger.ettr_hours],
        "bottleneck": ledger.bottleneck,
        "promise": None if ledger.promise is None else asdict(ledger.promise),
        "advice": list(words.advice(ledger)),
        "missing": list(ledger.missing),
    }
    told: dict[str, Any] = _finite(document)
    return told


def _incident(one: Incident) -> dict[str, Any]:
    own = {"cost_s": one.cost_s, "owner": words.fault_brief(one), "parts": _parts(one.parts)}
    return asdict(one) | own | {"proof": list(one.proof), "sources": _sources(one.sources)}


def _parts(parts: Parts, *, everything: bool = False) -> dict[str, float]:
    """Return seconds by part; all parts if ``everything``, else those that are there."""
    return {str(part): parts.get(part, 0.0) for part in Part if everything or part in parts}


def _sources(sources: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"source": name, "nbytes": nbytes} for name, nbytes in sources]


def _machine(one: MachineSeries) -> dict[str, Any]:
    about = {"host": one.host, "generation": one.generation, "began_s": one.began_s, "period_s": one.period_s}
    return about | {"values": {name: _summary(values) for name, values in one.values.items()}}


def _summary(values: Sequence[float]) -> dict[str, float | None]:
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return {"samples": 0, "min": None, "mean": None, "max": None}
    return {
        "samples": int(known.size),
        "min": float(known.min()),
        "mean": float(known.mean()),
        "max": float(known.max()),
    }


def _moment(unix_s: float) -> str:
    return when(unix_s).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _finite(value: Any) -> Any:
    """Return the document with null for what is no number: JSON has no NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value
