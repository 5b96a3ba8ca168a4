"""How many nodes to hold ready, so that a failed one is replaced at once."""

from __future__ import annotations

import math


def failure_probability(failures_per_1000_node_days: float, *, window_days: float = 1.0) -> float:
    """Return the chance that a given node fails within the window."""
    return -math.expm1(-failures_per_1000_node_days / 1000 * window_days)


def spare_nodes(nodes: int, *, probability: float, quantile: float = 0.99) -> int:
    """Return the least number of spares that suffices in a share ``quantile`` of all windows.

    The quantile of a binomial distribution: nodes fail independently, each with ``probability`` within the time that
    it takes to mend one. ByteRobust (arXiv 2509.16293, table 5) holds its P99 ready: 2, 2, 3 and 4 of 128, 256, 512
    and 1,024 machines, which is what this gives for 0.12 % a day.
    """
    if probability >= 1:
        return nodes
    term = math.exp(nodes * math.log1p(-probability))
    if term == 0.0:
        return _by_logarithms(nodes, probability, quantile)
    spares, total = 0, term
    while total < quantile and spares < nodes:
        term *= (nodes - spares) / (spares + 1) * probability / (1 - probability)
        spares += 1
        total += term
    return spares


def _by_logarithms(nodes: int, probability: float, quantile: float) -> int:
    """Return the same where the chance of no failure is too small for a float."""
    total, log_odds = 0.0, math.log(probability) - math.log1p(-probability)
    log_none, log_all = nodes * math.log1p(-probability), math.lgamma(nodes + 1)
    for spares in range(nodes + 1):
        ways = log_all - math.lgamma(spares + 1) - math.lgamma(nodes - spares + 1)
        total += math.exp(log_none + ways + spares * log_odds)
        if total >= quantile:
            return spares
    return nodes
