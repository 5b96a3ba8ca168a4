"""What a step is spent on, by rank and over time, and what the machines did meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from resilient.report.axis import Axis, nice
from resilient.report.bins import Envelope, Floats, envelope, regular
from resilient.report.charts import (
    AXIS_HEIGHT,
    WIDE,
    band_path,
    curve,
    figure,
    grid,
    heading,
    legend,
    mean_path,
    plot,
    rect,
    steps_path,
    stretched,
    time_axis,
)
from resilient.report.html import Child, Html, el, joined
from resilient.report.model import Ledger, MachineSeries, PictureTime
from resilient.report.units import count, duration, one_line, percent, rate

KINDS: Final = ("compute", "optimizer", "exchange", "data", "save")
"""What a step is spent on, in the order in which it is drawn."""

_MOST_RANKS: Final = 16
_MOST_HOSTS: Final = 4
_BINS: Final = 300
_CLOSE_S: Final = 30.0
_MOST_SAMPLES: Final = 1500
_MOST_ROWS: Final = 16
_HEIGHT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What can be measured of a machine: ``most`` is the end of its scale, None if the values say that."""

    name: str
    title: str
    most: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    title: str
    extent: str
    drawn: Child


_QUANTITIES: Final = (
    Quantity(name="cpu", title="CPU", most=1.0),
    Quantity(name="accelerator", title="Accelerators", most=1.0),
    Quantity(name="power_w", title="Accelerator power", most=None),
    Quantity(name="sent_Bps", title="Network, sent", most=None),
    Quantity(name="received_Bps", title="Network, received", most=None),
)


def shown(quantity: str, value: float) -> str:
    """Return a value of a machine with its unit."""
    if quantity in {"cpu", "accelerator"}:
        return percent(value) if value not in {0, 1} else f"{100 * value:.0f} %"
    if quantity == "power_w":
        return f"{value / 1000:.3g} kW" if value >= 1000 else f"{value:.3g} W"
    return rate(value)


def by_rank(pictures: Sequence[PictureTime]) -> dict[int, dict[str, float]]:
    """Return for each rank what its steps are spent on: mean seconds a step by kind, and the whole ``step``."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * (len(KINDS) + 2))
    for one in pictures:
        values = (one.compute_s, one.optimizer_s, one.exchange_s, one.data_s, one.save_s, one.step_s, 1.0)
        total = sums[one.rank]
        for place, value in enumerate(values):
            total[place] += value
    names = (*KINDS, "step")
    return {
        rank: {name: value / total[-1] for name, value in zip(names, total, strict=False)}
        for rank, total in sorted(sums.items())
    }


def ranks(ledger: Ledger) -> Html:
    """Return one bar for each rank; of very many, of those that wait least and most for the others."""
    means = by_rank(ledger.pictures)
    if not means:
        return el("p", "No step was looked into (picture=False, or too short a run).")
    chosen = _chosen(means)
    top_s = max(sum(means[rank][kind] for kind in KINDS) for rank in chosen) or 1.0
    body = [_rank_row(rank, means[rank], top_s) for rank in chosen]
    numbers = [el("th", kind, scope="col", class_="n") for kind in KINDS]
    head = el(
        "tr",
        el("th", "Rank", scope="col"),
        el("th", "A step", scope="col", class_="bar-cell"),
        el("th", "Step", scope="col", class_="n"),
        numbers,
    )
    caption = f"Mean of {count(len(ledger.pictures), 'picture')}."
    if len(chosen) < len(means):
        half = _MOST_RANKS // 2
        caption += f" {len(chosen)} of {len(means)} ranks: the {half} that wait least for the others, and most."
    table = el("table", el("caption", caption), el("thead", head), el("tbody", body), class_="ranks")
    return joined(legend([(f"k-{kind}", kind) for kind in KINDS]), el("div", table, class_="wide", tabindex="0"))


def _chosen(means: dict[int, dict[str, float]]) -> list[int]:
    if len(means) <= _MOST_RANKS:
        return list(means)
    ordered = sorted(means, key=lambda rank: means[rank]["exchange"])
    half = _MOST_RANKS // 2
    return sorted([*ordered[:half], *ordered[-half:]])


def _rank_row(rank: int, mean: dict[str, float], top_s: float) -> Html:
    at, marks = 0.0, []
    for kind in KINDS:
        share = mean[kind] / top_s
        marks.append(rect(at, 0, share, 18, kind=f"seg k-{kind}", tip=f"rank {rank}, {kind}: {duration(mean[kind])}"))
        at += share
    said = f"rank {rank}: " + ", ".join(f"{kind} {duration(mean[kind])}" for kind in KINDS)
    cells = [el("td", duration(mean[kind]), class_="n") for kind in KINDS]
    return el(
        "tr",
        el("th", rank, scope="row"),
        el("td", plot(18, marks, label=said), class_="bar-cell"),
        el("td", duration(mean["step"]), class_="n"),
        cells,
    )


def together(ledger: Ledger) -> Html | None:
    """Return steps and machines over the life of the run, one above the other on one axis of time."""
    axis = Axis(began_s=ledger.began_s, ended_s=ledger.as_of_s)
    hosts = host_names(ledger.machines)
    lanes = [_pictures(ledger.pictures, axis)] if ledger.pictures else []
    lanes += [lane for one in _QUANTITIES if (lane := _over_life(one, ledger.machines, hosts, axis)) is not None]
    if not lanes:
        return None
    y = _lanes_height(len(lanes))
    failures = [
        el("line", x1=axis.x(one.at_s), x2=axis.x(one.at_s), y1=0, y2=y, class_="failure-line")
        for one in ledger.incidents
    ]
    entries = [(f"k-{kind}", kind) for kind in KINDS] if ledger.pictures else []
    shaded = "Line: mean; shaded: from the least to the largest sample. " if ledger.machines else ""
    caption = f"One axis of time, UTC. {shaded}{'Dotted upright lines: failures.' if failures else ''}"
    drawn = _stack(lanes, axis, failures, "Steps and machines over the life of the run")
    means = machine_means(ledger.machines) if ledger.machines else None
    return joined(legend([*entries, *_host_entries(hosts)]), figure(drawn, caption=caption, axis=axis), means)


def close_up(ledger: Ledger) -> Html | None:
    """Return the last half minute of the machines, sample by sample: what takes turns within a step shows there."""
    if not ledger.machines:
        return None
    ended_s = max(one.began_s + one.period_s * _length(one) for one in ledger.machines)
    axis = Axis(began_s=max(ledger.began_s, ended_s - _CLOSE_S), ended_s=ended_s)
    near = [one for one in ledger.machines if one.began_s + one.period_s * _length(one) > axis.began_s]
    everywhere = host_names(ledger.machines)  # in their order, so that a node looks as it does above
    hosts = everywhere if len(everywhere) <= _MOST_HOSTS else host_names(near)[:_MOST_HOSTS]
    lanes = [lane for one in _QUANTITIES if (lane := _samples(one, near, hosts, axis)) is not None]
    if not lanes:
        return None
    drawn = _stack(lanes, axis, [], f"Machines in the last {duration(axis.span_s)}")
    caption = f"The last {duration(axis.span_s)} of samples, one every {duration(min(one.period_s for one in near))}."
    return joined(legend(_host_entries(hosts)), figure(drawn, caption=caption, axis=axis))


def _lanes_height(lanes: int) -> float:
    return lanes * (22.0 + _HEIGHT + 12)


def _stack(lanes: Sequence[_Lane], axis: Axis, over: Sequence[Child], said: str) -> Html:
    marks: list[Child] = []
    titles: list[Child] = []
    for place, lane in enumerate(lanes):
        y = _lanes_height(place)
        marks.append(el("svg", lane.drawn, x=0, y=y + 22, width="100%", height=_HEIGHT))
        titles.append(heading(y, lane.title, lane.extent))
    y = _lanes_height(len(lanes))
    names = ", ".join(lane.title for lane in lanes)
    return plot(round(y) + AXIS_HEIGHT, marks, over, titles, time_axis(axis, y), label=f"{said}: {names}")


def _pictures(pictures: Sequence[PictureTime], axis: Axis) -> _Lane:
    times = np.array([one.at_s for one in pictures])
    # A picture stands for the time until the next one: no more bins than half the pictures of one rank.
    bins = max(1, min(_BINS, len(pictures) // max(1, len({one.rank for one in pictures})) // 2))
    columns = {
        "compute": [one.compute_s for one in pictures],
        "optimizer": [one.optimizer_s for one in pictures],
        "exchange": [one.exchange_s for one in pictures],
        "data": [one.data_s for one in pictures],
        "save": [one.save_s for one in pictures],
    }
    means = {kind: envelope([(times, columns[kind])], axis.began_s, axis.ended_s, bins).mean for kind in KINDS}
    total: Floats = np.sum([means[kind] for kind in KINDS], axis=0)
    top = nice(float(np.nanmax(total)) if np.isfinite(total).any() else 0.0)
    lower = np.where(np.isfinite(total), 0.0, math.nan)
    areas: list[Child] = []
    for kind in KINDS:
        upper = lower + means[kind]
        areas.append(el("path", el("title", kind), d=steps_path(lower, upper, _HEIGHT, top), class_=f"area k-{kind}"))
        lower = upper
    drawn = joined(grid(_HEIGHT), stretched(0, _HEIGHT, areas))
    return _Lane(title="A step, mean of ranks", extent=f"0 to {duration(top)}", drawn=drawn)


def host_names(machines: Sequence[MachineSeries]) -> list[str]:
    """Return the hosts in the order of their first samples."""
    return list(dict.fromkeys(one.host for one in machines))


def _host_entries(hosts: Sequence[str]) -> list[tuple[str, str]]:
    if len(hosts) > _MOST_HOSTS:
        return [("line-key h0", f"mean of {len(hosts)} nodes; shaded: all of them")]
    return [(f"line-key h{place}", one_line(host, most=40)) for place, host in enumerate(hosts)]


def _over_life(quantity: Quantity, machines: Sequence[MachineSeries], hosts: Sequence[str], axis: Axis) -> _Lane | None:
    """Return one quantity of each host; of many hosts, of all of them together."""
    groups = [[host] for host in hosts] if len(hosts) <= _MOST_HOSTS else [list(hosts)]
    found: list[tuple[int, Envelope]] = []
    for place, group in enumerate(groups):
        drawn = envelope(_points(quantity, machines, group), axis.began_s, axis.ended_s, _BINS)
        if np.isfinite(drawn.mean).any():
            found.append((place, drawn))
    if not found:
        return None
    top = quantity.most or nice(max(drawn.peak for _, drawn in found))
    bands = [el("path", d=band_path(drawn, _HEIGHT, top), class_=f"band h{place}") for place, drawn in found]
    lines = [el("path", d=mean_path(drawn, _HEIGHT, top), class_=f"line h{place}") for place, drawn in found]
    return _machine_lane(quantity, top, [*bands, *lines])


def _samples(quantity: Quantity, machines: Sequence[MachineSeries], hosts: Sequence[str], axis: Axis) -> _Lane | None:
    """Return one quantity of each host, sample by sample."""
    found: list[tuple[int, Floats, Floats]] = []
    for place, host in enumerate(hosts):
        for times, values in _points(quantity, machines, [host]):
            inside = (times >= axis.began_s) & (times <= axis.ended_s)
            thin = -(-int(inside.sum()) // _MOST_SAMPLES) or 1
            if np.isfinite(values[inside]).any():
                found.append((place, times[inside][::thin], values[inside][::thin]))
    if not found:
        return None
    top = quantity.most or nice(max(float(np.nanmax(values)) for _, _, values in found))
    lines = []
    for place, times, values in found:
        xs = (times - axis.began_s) * (WIDE / axis.span_s)
        lines.append(el("path", d=curve(list(xs), list(_HEIGHT - _HEIGHT * values / top)), class_=f"line h{place}"))
    return _machine_lane(quantity, top, lines)


def _machine_lane(quantity: Quantity, top: float, drawn: Sequence[Child]) -> _Lane:
    inside = joined(grid(_HEIGHT), stretched(0, _HEIGHT, drawn))
    return _Lane(title=quantity.title, extent=f"0 to {shown(quantity.name, top)}", drawn=inside)


def _points(quantity: Quantity, machines: Sequence[MachineSeries], hosts: Sequence[str]) -> list[tuple[Floats, Floats]]:
    return [
        (regular(one.began_s, one.period_s, len(values)), np.array(values, dtype=np.float64))
        for one in machines
        if one.host in hosts and (values := one.values.get(quantity.name))
    ]


def machine_means(machines: Sequence[MachineSeries]) -> Html:
    """Return a table of what each node did on average."""
    hosts = host_names(machines)
    there = [one for one in _QUANTITIES if any(one.name in series.values for series in machines)]
    rows = []
    for host in hosts[:_MOST_ROWS]:
        cells = [el("td", _mean(one, _points(one, machines, [host])), class_="n") for one in there]
        rows.append(el("tr", el("th", one_line(host, most=40), scope="row"), cells))
    head = el("tr", el("th", "Node", scope="col"), [el("th", one.title, scope="col", class_="n") for one in there])
    more = f", the first {_MOST_ROWS} of {len(hosts)}" if len(hosts) > _MOST_ROWS else ""
    caption = el("caption", f"Mean of each node{more}")
    return el("div", el("table", caption, el("thead", head), el("tbody", rows)), class_="wide", tabindex="0")


def _mean(quantity: Quantity, points: Sequence[tuple[Floats, Floats]]) -> str:
    values = np.concatenate([values for _, values in points]) if points else np.zeros(0)
    values = values[np.isfinite(values)]
    return shown(quantity.name, float(values.mean())) if values.size else "–"  # noqa: RUF001 -- a dash


def _length(one: MachineSeries) -> int:
    return max((len(values) for values in one.values.values()), default=0)
