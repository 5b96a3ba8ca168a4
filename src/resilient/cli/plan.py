"""``resilient plan``: what share of the time a job trains, how often to save, and what would help."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from resilient.cli import new_file, plan_chart
from resilient.cli.quantities import RATE, SHARE, TIME, TIME_OR_NONE
from resilient.cli.render import json_option, note, say, say_json, table
from resilient.cli.stop import whole_run
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, NotFoundError, UsageError
from resilient.policy.planning.choosing import OVERHEAD_BUDGET, Limit
from resilient.policy.planning.closed_form import daly_interval, lost_to_failure, rsc_ettr, young_interval
from resilient.policy.planning.outlook import Job, Near, Outlook, Pace, best_of, expected, look, overlaps
from resilient.policy.planning.presets import PRESETS, Preset
from resilient.report.fitting import Fitted, Measurement, fit
from resilient.report.units import count, duration, percent

_LIST: Final = "list"
_EXAMPLE: Final = "--svg plan.svg"
_DEFAULTS: Final[dict[str, float]] = {"gpus_per_node": 8, "stall_s": 1.0, "recovery_s": 300.0, "detection_s": 0.0}
_LEAST_BUDGET: Final = 1e-4
_MOST_GPUS: Final = 10_000_000
_LABELS: Final = {
    "gpus": "GPUs",
    "gpus_per_node": "GPUs of a node",
    "failures_per_1000_node_days": "failures in 1,000 node-days",
    "stall_s": "stall of a save",
    "persist_s": "a save is in the store after",
    "detection_s": "detection of a failure",
    "recovery_s": "recovery after it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What is planned with: values by name, and where each comes from."""

    values: dict[str, float]
    sources: dict[str, str]

    def job(self, near: Near | None, budget: float | None) -> Job:
        values = self.values
        return Job(
            gpus=int(values["gpus"]),
            gpus_per_node=int(values["gpus_per_node"]),
            failures_per_1000_node_days=values["failures_per_1000_node_days"],
            stall_s=values["stall_s"],
            recovery_s=values["recovery_s"],
            persist_s=values.get("persist_s"),
            detection_s=values["detection_s"],
            budget=budget,
            near=near,
        )


@click.command(epilog="Durations: 500ms, 5s, 2min, 1h, 1d; a bare number is seconds. The model: docs/planning.md.")
@click.option("--gpus", type=click.IntRange(1, _MOST_GPUS), help="Of the job.")
@click.option(
    "--gpus-per-node", type=click.IntRange(1, _MOST_GPUS), help="How many of them fail together.  [default: 8]"
)
@click.option(
    "--failures-per-1000-node-days",
    type=RATE,
    help="How often nodes fail: 2.34 to 6.50 in published clusters (--preset list).",
)
@click.option("--stall", "stall_s", type=TIME_OR_NONE, help="For how long a save holds up training.  [default: 1s]")
@click.option("--interval", "interval_s", type=TIME, help="Training between two saves to the store; else the best.")
@click.option(
    "--recovery", "recovery_s", type=TIME_OR_NONE, help="From a failure's detection to training.  [default: 5min]"
)
@click.option("--detection", "detection_s", type=TIME_OR_NONE, help="Until a failure is noticed.  [default: 0]")
@click.option(
    "--persist",
    "--upload-lag",
    "persist_s",
    type=TIME_OR_NONE,
    help="From the start of a save until it is in the store.  [default: its stall]",
)
@click.option("--overhead-budget", "budget", type=SHARE, help="Share that saving may take.  [default: any]")
@click.option("--local-interval", "near_s", type=TIME, help="A tier on the nodes: training between saves to it.")
@click.option("--local-survives", "survives", type=SHARE, help="In which share of failures.  [default: 0.9]")
@click.option(
    "--local-recovery",
    "near_recovery_s",
    type=TIME_OR_NONE,
    help="Recovery from it.  [default: a third of --recovery]",
)
@click.option("--preset", help="Published figures by name; 'list' shows them with their sources.")
@click.option("--from", "run", metavar="RUN", help="Take what is not given from what this run has measured.")
@click.option("--svg", "picture", type=click.Path(), help="Also draw ETTR over the interval to a file.")
@click.option("--overwrite", is_flag=True, help="Replace that file if it is there.")
@json_option
def plan(  # noqa: PLR0913 -- an option each
    *,
    interval_s: float | None,
    budget: float | None,
    near_s: float | None,
    survives: float | None,
    near_recovery_s: float | None,
    preset: str | None,
    run: str | None,
    picture: str | None,
    overwrite: bool,
    as_json: bool,
    **given: float | None,
) -> None:
    """Say what share of the time a job trains, how often it should save, and what would help most.

    The share is the effective training time ratio (ETTR): of the wall clock, what goes into steps that are kept. By
    Daly's complete model; with a tier on the nodes (--local-...), by simulating 400,000 failures.

    \b
    Examples:
      resilient plan --gpus 16384 --preset llama3 --stall 5s --recovery 5min
      resilient plan --gpus 100000 --failures-per-1000-node-days 2.34 --stall 5s --interval 2min --recovery 2min
      resilient plan --gpus 4096 --preset rsc-1 --persist 3min --local-interval 1min --local-survives 90%
      resilient plan --from s3://bucket/runs/gpt --gpus 8192    the same run, larger
    """  # noqa: D301 -- \\b is click's mark for lines that stay as they are
    if preset == _LIST:
        _list_presets(as_json=as_json)
        return
    if picture is not None:
        new_file.refuse(Path(picture), overwrite=overwrite, example=_EXAMPLE)
    published = _preset(preset)
    fitted = None if run is None else _fitted(run)
    inputs = _gather(given, published, preset, fitted, run)
    near = None
    if (near_s, survives, near_recovery_s) != (None, None, None):
        third_s = inputs.values["recovery_s"] / 3
        near = Near(
            interval_s=near_s,
            survives=0.9 if survives is None else survives,
            recovery_s=third_s if near_recovery_s is None else near_recovery_s,
        )
    if budget is not None and budget < _LEAST_BUDGET:
        raise UsageError(
            f"--overhead-budget is {percent(budget)}: no save costs nothing",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="take a share such as 0.05 or 5%",
        )
    job = inputs.job(near, budget)
    _check(job, interval_s)
    outlook = look(job, interval_s)
    if picture is not None:
        drawn = plan_chart.svg(outlook, title=f"ETTR of {_what(job)}")
        new_file.write(Path(picture), drawn, overwrite=overwrite, example=_EXAMPLE)
    bounds = None if fitted is None else _between(inputs, job, outlook, fitted)
    if as_json:
        say_json(_document(job, outlook, inputs, fitted, bounds, asked_s=_rounded_from(outlook, interval_s)))
    else:
        _show(job, outlook, inputs, asked_s=_rounded_from(outlook, interval_s))
        _show_fit(fitted, bounds)


def _preset(name: str | None) -> Preset | None:
    if name is None or name in PRESETS:
        return None if name is None else PRESETS[name]
    raise UsageError(
        f"--preset {name}: there is no such preset",
        kind=ErrorKind.INVALID_ARGUMENT,
        hint=f"one of {', '.join(PRESETS)}; `resilient plan --preset list` shows what is in them",
    )


def _fitted(run: str) -> Fitted:
    place = whole_run(run, "plan")
    from resilient.report.account import read_ledger  # noqa: PLC0415 -- most plans are of no run

    fitted = fit(read_ledger(place.store, clock=SYSTEM_CLOCK))
    if fitted is None:
        raise NotFoundError(
            f"{place.url}: this run keeps no account: nothing tells of the steps that it has made",
            kind=ErrorKind.NO_SUCH_OBJECT,
            hint="plan from what you know, with --gpus, --failures-per-1000-node-days, --stall and --recovery",
        )
    return fitted


def _gather(
    given: dict[str, float | None], published: Preset | None, preset: str | None, fitted: Fitted | None, run: str | None
) -> _Inputs:
    """Return what to plan with: what was asked for over what was measured over what was published over defaults."""
    values, sources = {}, {}
    for source, found in (
        ("default", _DEFAULTS),
        (f"preset {preset}", _of_preset(published)),
        (str(run), _of_fit(fitted)),
        ("given", given),
    ):
        known = {name: value for name, value in found.items() if value is not None}
        values.update(known)
        sources.update(dict.fromkeys(known, source))
    for name, option in (("gpus", "--gpus"), ("failures_per_1000_node_days", "--failures-per-1000-node-days")):
        if name not in values:
            raise UsageError(f"{option} is missing{_why_missing(fitted)}", kind=ErrorKind.INVALID_ARGUMENT, hint=_HINT)
    return _Inputs(values=values, sources=sources)


_HINT: Final = "give it, or take published figures: --preset llama3, or another of --preset list"


def _why_missing(fitted: Fitted | None) -> str:
    if fitted is None:
        return ""
    seen = f"0 failures in {fitted.node_days:.3g} node-days say little about a rate"
    return f": {seen}, no more than that it is below {fitted.rate_high:,.3g} (with 95 % confidence)"


def _of_preset(preset: Preset | None) -> dict[str, float | None]:
    if preset is None:
        return {}
    return {name: getattr(preset, name) for name in _LABELS if hasattr(preset, name)}


def _of_fit(fitted: Fitted | None) -> dict[str, float | None]:
    if fitted is None:
        return {}
    return {
        "gpus": fitted.gpus,
        "gpus_per_node": fitted.gpus_per_node,
        "failures_per_1000_node_days": fitted.rate,
        **{
            f"{name}_s": None if found is None else found.mean_s
            for name, found in _measurements(fitted).items()
            if name != "interval"
        },
    }


def _measurements(fitted: Fitted) -> dict[str, Measurement | None]:
    return {name: getattr(fitted, name) for name in ("stall", "persist", "recovery", "detection", "interval")}


def _check(job: Job, interval_s: float | None) -> None:
    """Refuse intervals that cannot be."""
    if interval_s is None:
        return
    near = job.near
    if near is not None and near.interval_s is not None and near.interval_s > interval_s:
        raise UsageError(
            f"--local-interval {duration(near.interval_s)} is longer than --interval {duration(interval_s)}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="what goes to the store goes to the nodes as well: save to them at least as often",
        )
    # As asked for: what is rounded up afterwards must not hide that it could not be.
    if overlaps(job, Pace(interval_s=interval_s, near_interval_s=best_of(job).near_interval_s)):
        raise UsageError(
            f"--interval {duration(interval_s)}: the next save would begin before the last one is in the store "
            f"({duration(job.durable_s)} after its start)",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="take a longer interval or a shorter --persist; without --interval, the best one is found",
        )


def _rounded_from(outlook: Outlook, interval_s: float | None) -> float | None:
    """Return what was asked for, if that is not what is planned."""
    return None if interval_s is None or math.isclose(interval_s, outlook.interval_s) else interval_s


def _between(inputs: _Inputs, job: Job, outlook: Outlook, fitted: Fitted) -> tuple[float, float] | None:
    """Return ETTR at the ends of what the rate may be; None where the rate was given."""
    if fitted.rate is None or inputs.values["failures_per_1000_node_days"] != fitted.rate:
        return None
    ends, pace = [], Pace(interval_s=outlook.interval_s, near_interval_s=outlook.near_interval_s)
    for rate in (fitted.rate_high, fitted.rate_low):
        values = {**inputs.values, "failures_per_1000_node_days": rate}
        other = _Inputs(values=values, sources=inputs.sources).job(job.near, job.budget)
        ends.append(expected(other, pace)[0])
    return ends[0], ends[1]


def _what(job: Job) -> str:
    return f"{count(job.gpus, 'GPU')} on {count(job.nodes, 'node')}"


# --- as text ----------------------------------------------------------------------------------------------------------


def _show(job: Job, outlook: Outlook, inputs: _Inputs, *, asked_s: float | None) -> None:
    rate = job.failures_per_1000_node_days
    say(f"{_what(job)}, {rate:.3g} failures in 1,000 node-days")
    _show_interval(job, outlook, asked_s)
    say(f"  lost                        {outlook.gpu_hours_lost_a_day:,.0f} GPU-hours a day")
    say(f"  spare nodes                 {outlook.spares} replace all that fail, on 99 of 100 days")
    say("")
    table(("planned with", "value", "from"), _assumptions(job, inputs), right=("value",))
    say("")
    rows = [(each.what, percent(each.ettr), f"{each.gpu_hours_a_day:+,.0f}") for each in outlook.improvements]
    if rows:
        table(("what would help", "ETTR", "GPU-hours a day"), rows, right=("ETTR", "GPU-hours a day"))
        say("")
    dots = "·●" if (sys.stdout.encoding or "").lower().startswith("utf") else ".o"
    curve = plan_chart.rows(outlook, dots=dots)
    table(("interval", "ETTR", plan_chart.heading(outlook)), curve, right=("interval", "ETTR"))


def _show_interval(job: Job, outlook: Outlook, asked_s: float | None) -> None:
    chosen, best, auto = outlook.interval_s, outlook.best, outlook.auto
    sure = f" ± {100 * outlook.half_width:.2g}" if outlook.half_width else ""
    say(f"  mean time between failures  {duration(outlook.mtbf_s)}")
    say(f"  share of productive time    {percent(outlook.ettr)}{sure} (ETTR), saving every {duration(chosen)}")
    if asked_s is not None:
        near = duration(outlook.near_interval_s or 0.0)
        say(f"{'':<30}{duration(asked_s)} was asked for: it is rounded to a multiple of --local-interval {near}")
    say(f"  best interval               {duration(best.interval_s)} ({percent(outlook.best_ettr)}), {_by(best.limit)}")
    if auto is not None:
        takes = job.stall_s / (best.interval_s + job.stall_s)
        bound = f"{auto.limit} of {100 * OVERHEAD_BUDGET:g} %"
        why = f"it keeps within its {bound}; at best, saves take {percent(takes)} of the time"
        if auto.limit is Limit.PERSIST:
            why = "it leaves a quarter more than a save needs to be in the store, as that varies"
        say(f'  every="auto" would take     {duration(auto.interval_s)} ({percent(auto.ettr)}): {why}')
    if outlook.near_interval_s is not None:
        how = ""
        if outlook.near_interval_s != best.near_interval_s:
            how = f"; at best {duration(best.near_interval_s or 0.0)}, {_by(best.near_limit)}"
        elif best.near_limit is not None:
            how = f", {_by(best.near_limit)}"
        say(f"  to the tier on the nodes    every {duration(outlook.near_interval_s)}{how}")


def _by(limit: Limit | None) -> str:
    return "as --local-interval is given" if limit is Limit.GIVEN else f"by {limit}"


def _assumptions(job: Job, inputs: _Inputs) -> list[tuple[str, str, str]]:
    rows = []
    for name, label in _LABELS.items():
        value, source = inputs.values.get(name), inputs.sources.get(name, "default")
        if name == "persist_s" and value is None:
            value = job.stall_s
        if value is not None:
            rows.append((label, _value(name, value), source))
    if job.near is not None:
        rows.append(("nodes keep their copy in", percent(job.near.survives), "of failures"))
        rows.append(("recovery from that", duration(job.near.recovery_s), ""))
    return rows


def _value(name: str, value: float) -> str:
    if name.endswith("_s"):
        return duration(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _show_fit(fitted: Fitted | None, bounds: tuple[float, float] | None) -> None:
    if fitted is None:
        return
    say("")
    seen = f"{count(fitted.failures, 'failure')} in {fitted.node_days:,.3g} node-days"
    say(f"measured: {seen}: with 95 % confidence {fitted.rate_low:,.3g} to {fitted.rate_high:,.3g} in 1,000")
    if bounds is not None:
        say(f"  so the share of productive time is between {percent(bounds[0])} and {percent(bounds[1])}")
    for name, found in _measurements(fitted).items():
        if found is not None:
            spread = f"{duration(found.low_s)} to {duration(found.high_s)}"
            idle = fitted.idle if name == "recovery" else None
            of_it = "" if idle is None else f"; of it {duration(idle.mean_s)} waiting to be started again"
            say(f"  {name:<10}{duration(found.mean_s)} on average, {spread}, {count(found.count, 'time')}{of_it}")
    if fitted.failures < 10 and bounds is not None:  # of another rate, this one says nothing
        note(f"{count(fitted.failures, 'failure')} say little about a rate: compare with --preset list")


def _list_presets(*, as_json: bool) -> None:
    if as_json:
        say_json({"presets": {name: asdict(each) for name, each in PRESETS.items()}})
        return
    for name, each in PRESETS.items():
        rate = each.failures_per_1000_node_days
        figures = [f"{rate:g} failures in 1,000 node-days"] if rate is not None else []
        figures += [f"{each.gpus:,} GPUs, {each.gpus_per_node} a node"] if each.gpus is not None else []
        figures += [f"detection {duration(each.detection_s)}"] if each.detection_s is not None else []
        figures += [f"recovery {duration(each.recovery_s)}"] if each.recovery_s is not None else []
        say(f"{name:<12}{'; '.join(figures)}")
        say(f"{'':<12}{each.about}")
        say(f"{'':<12}source: {each.source}")
        if each.caution:
            say(f"{'':<12}careful: {each.caution}")


# --- as JSON ----------------------------------------------------------------------------------------------------------


def _document(
    job: Job,
    outlook: Outlook,
    inputs: _Inputs,
    fitted: Fitted | None,
    bounds: tuple[float, float] | None,
    *,
    asked_s: float | None,
) -> dict[str, Any]:
    interval_s, best = outlook.interval_s, outlook.best
    return {
        "gpus": job.gpus,
        "nodes": job.nodes,
        "mtbf_s": outlook.mtbf_s,
        "interval_s": interval_s,
        "rounded_from_s": asked_s,
        "local_interval_s": outlook.near_interval_s,
        "ettr": outlook.ettr,
        "ettr_half_width": outlook.half_width,
        "best_interval_s": best.interval_s,
        "best_ettr": outlook.best_ettr,
        "limited_by": best.limit,
        "best_local_interval_s": best.near_interval_s,
        "local_limited_by": best.near_limit,
        "auto": None if outlook.auto is None else asdict(outlook.auto),
        "overhead": job.stall_s / ((outlook.near_interval_s or interval_s) + job.stall_s),
        "lost_to_failure_s": lost_to_failure(interval_s, stall_s=job.stall_s, persist_s=job.durable_s),
        "gpu_hours_lost_a_day": outlook.gpu_hours_lost_a_day,
        "spares": outlook.spares,
        "young_interval_s": young_interval(job.stall_s, job.mtbf_s),
        "daly_interval_s": daly_interval(job.stall_s, job.mtbf_s),
        "rsc_ettr": rsc_ettr(
            interval_s, stall_s=job.stall_s, mtbf_s=job.mtbf_s, recovery_s=job.recovery_s + job.detection_s
        ),
        "planned_with": {
            name: {"value": inputs.values[name], "from": inputs.sources[name]}
            for name in _LABELS
            if name in inputs.values
        },
        "local": None if job.near is None else asdict(job.near),
        "improvements": [asdict(each) for each in outlook.improvements],
        "curve": [{"interval_s": x, "ettr": y} for x, y in outlook.curve],
        "measured": None if fitted is None else asdict(fitted),
        "ettr_between": bounds,
    }
