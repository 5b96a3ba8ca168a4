"""Published figures to plan with, each with its source and what to be careful about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Figures of one publication; None: it has none. Times in seconds; ``recovery_s`` without detection."""

    about: str
    source: str
    caution: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    failures_per_1000_node_days: float | None = None
    detection_s: float | None = None
    recovery_s: float | None = None


_RSC: Final = (
    "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680"
)
_BYTEROBUST: Final = "Wan et al., Robust LLM Training Infrastructure at ByteDance (ByteRobust), arXiv 2509.16293"

PRESETS: Final[dict[str, Preset]] = {
    "llama3": Preset(
        about="419 unexpected interruptions in 54 days on 16,384 H100",
        source="Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4",
        caution="counted by interruptions of one job; planned ones (47) are not in it",
        gpus=16_384,
        gpus_per_node=8,
        failures_per_1000_node_days=3.79,
    ),
    "rsc-1": Preset(
        about="RSC-1, a research cluster of 16,000 A100, projected from node failures",
        source=_RSC,
        caution="small jobs fail more often than this projects: see rsc-1-jobs",
        gpus=16_000,
        gpus_per_node=8,
        failures_per_1000_node_days=6.50,
    ),
    "rsc-2": Preset(
        about="RSC-2, a research cluster of 8,000 A100, projected from node failures",
        source=_RSC,
        gpus=8_000,
        gpus_per_node=8,
        failures_per_1000_node_days=2.34,
    ),
    "rsc-1-jobs": Preset(
        about="mean time to failure of 7.9 h, measured of jobs with 1,024 GPUs",
        source=_RSC,
        caution="calculated from that figure: 24 h / 7.9 h for 128 nodes; 3.6 times what rsc-1 projects",
        gpus=1_024,
        gpus_per_node=8,
        failures_per_1000_node_days=23.7,
    ),
    "byterobust": Preset(
        about="9,600 GPUs; a lost GPU is detected in 10 s, a hot update takes 65 s",
        source=_BYTEROBUST,
        caution="the rate is calculated from its numbers of spares (table 5): 0.12 % of the machines a day",
        gpus=9_600,
        gpus_per_node=8,
        failures_per_1000_node_days=1.2,
        detection_s=10.0,
        recovery_s=65.0,
    ),
    "ft-hsdp": Preset(
        about="a failure every 18 min on about 100,000 GPUs",
        source="Fault-tolerant HSDP, arXiv 2602.00277",
        caution="calculated from that figure, for nodes with 8 GPUs",
        gpus=100_000,
        gpus_per_node=8,
        failures_per_1000_node_days=6.40,
    ),
}
