"""One sentence on what a step is spent on most, and what limits it: a slow rank, a link, the input, or computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

WORTH: Final = 1 / 3
"""From that share of a step on something besides computing is the bottleneck."""

_TOLD: Final = 0.1
"""Parts below that share are not named."""

_SLOW: Final = 0.1
"""A rank is slow if it needs so much of a step more than the others for itself ..."""

_EXPLAINS: Final = 0.5
"""... and that is so much of what the others spend in the exchange."""

_FULL: Final = 0.6
"""A link that carries this share of what it can is full: protocols and gaps between transfers take the rest."""

_FAR_BELOW: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a step of one rank is spent on, seconds; as `resilient.events.StepPicture`."""

    rank: int
    step_s: float
    compute_s: float
    exchange_s: float
    data_s: float
    optimizer_s: float
    save_s: float

    @property
    def parts(self) -> Mapping[str, float]:
        return {
            "compute": self.compute_s,
            "exchange": self.exchange_s,
            "data wait": self.data_s,
            "optimizer": self.optimizer_s,
            "save stall": self.save_s,
        }

    @property
    def alone_s(self) -> float:
        """What this rank needs by itself: others wait for it in the exchange."""
        return self.step_s - self.exchange_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What a link of a node carries, bytes a second on average over all the time, and what it can carry.

    ``capable``: None if nobody says. ``loopback``: it leads nowhere.
    """

    host: str
    name: str
    sent: float
    received: float
    capable: float | None = None
    loopback: bool = False

    @property
    def busy(self) -> float:
        return max(self.sent, self.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``about`` is what the sentence is about, so that one can tell whether that has changed."""

    about: str
    sentence: str


def name_bottleneck(ranks: Sequence[Spent], links: Sequence[LinkUse] = (), faults: Sequence[str] = ()) -> Finding:
    """Name the bottleneck.

    Args:
        ranks: the pictures of some ranks, at least one.
        links: those of the nodes of these ranks.
        faults: what is known to be wrong with the links of devices, in words: "the GPU at 0000:17:00.0 runs at x8 of
            x16".
    """
    names = ranks[0].parts
    usual = {name: median(each.parts[name] for each in ranks) for name in names}
    step_s = max(median(each.step_s for each in ranks), sum(usual.values()), 1e-9)
    slow = _slow_rank(ranks)
    if slow is not None:
        return slow
    largest = max((name for name in names if name != "compute"), key=usual.__getitem__)
    if usual[largest] < WORTH * step_s:
        largest = "compute"
    told = sorted((name for name in names if name == largest or usual[name] >= _TOLD * step_s), key=usual.__getitem__)
    told.sort(key=lambda name: name != largest)
    shares = ", ".join(f"{usual[name] / step_s:.0%} {name} ({seconds(usual[name])})" for name in told)
    about, limit = largest, _LIMITS.get(largest, "")
    if largest == "exchange":
        about, limit = _limit_of_exchange(links, usual[largest] / step_s, faults)
    return Finding(about=about, sentence=f"A step of {seconds(step_s)}: {shares}; {limit}.")


_LIMITS: Final = {
    "compute": "computing is the limit, not the exchange",
    "data wait": "the input is the limit: give the loader more workers, or bring the data nearer",
    "optimizer": "the optimizer is the limit: a fused one (fused=True), or one that is sharded, takes less",
    "save stall": "saves hold it up: save less often, or see what they wait for in the report",
}


def _slow_rank(ranks: Sequence[Spent]) -> Finding | None:
    """Return what is to be said if one rank holds up all others."""
    if len(ranks) < 2:
        return None
    slow = max(ranks, key=lambda each: each.alone_s)
    others = [each for each in ranks if each is not slow]
    usual_s, exchange_s = median(each.alone_s for each in others), median(each.exchange_s for each in others)
    more_s = slow.alone_s - usual_s
    if more_s < _SLOW * slow.step_s or min(more_s, exchange_s - slow.exchange_s) < _EXPLAINS * exchange_s:
        return None
    own = {name: value for name, value in slow.parts.items() if name != "exchange"}
    what = max(own, key=lambda name: own[name] - median(each.parts[name] for each in others))
    return Finding(
        about=f"rank {slow.rank} {what}",
        sentence=(
            f"A step of {seconds(slow.step_s)}: rank {slow.rank} needs {seconds(slow.alone_s)} of it for itself, the "
            f"others {seconds(usual_s)} (most of the difference is {what}): they wait for it in the exchange."
        ),
    )


def _limit_of_exchange(links: Sequence[LinkUse], share: float, faults: Sequence[str]) -> tuple[str, str]:
    """Return what limits an exchange that takes this share of a step: what it is about, and the words."""
    outside = [link for link in links if not link.loopback and link.busy > 0]
    inside = [link for link in links if link.loopback and link.busy > 0]
    known = f"; {faults[0]}" if faults else ""
    local = max(inside, key=lambda link: link.busy, default=None)
    # By the share of what it can do; all nodes of a ring send alike, and the slowest link holds up all.
    link = max(outside, key=lambda link: (link.busy / (link.capable or float("inf")), link.busy), default=None)
    if local is not None and (link is None or local.busy > link.busy):
        rate = bits(local.busy / share)
        return (
            f"loopback{known}",
            f"it stays on {local.host}, over the loopback, at {rate}: processors limit it, or who comes late{known}",
        )
    if link is None:
        where = "no link of the machine carries it: it stays among the accelerators (NVLink, PCIe)"
        return f"no link{known}", f"{where}{known}"
    where = f"{link.name} of {link.host}"
    meanwhile = link.busy / share  # it is idle while others compute
    if link.capable is None:
        return f"{where}{known}", f"{where} carries {bits(meanwhile)} meanwhile, and does not say what it can do{known}"
    used = min(1.0, meanwhile / link.capable)
    of = f"{bits(min(meanwhile, link.capable))} of the {bits(link.capable)} that it can do"
    if used >= _FULL:
        return f"full {where}{known}", f"{where} carries {of}: the network is the limit{known}"
    if used >= _FAR_BELOW:
        return f"{where}{known}", f"{where} carries {of} meanwhile{known}"
    advice = "look at the switch, the cable, limits (tc), or for many small messages"
    return (
        f"throttled {where}{known}",
        f"{where} carries {bits(meanwhile)} on a link of {bits(link.capable)}: {faults[0] if faults else advice}",
    )


def seconds(value: float) -> str:
    """Return a duration in words: ``412 ms``, ``1.24 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e-6)} us"


def bits(nbytes_per_s: float) -> str:
    """Return a rate in words: ``0.98 Gbit/s``."""
    value = 8 * nbytes_per_s
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if value >= 0.95 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{value:.0f} bit/s"


def _digits(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
