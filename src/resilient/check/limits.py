"""From where on a node counts as slow or as failed, and where each number comes from.

Sources: *Azure* is azurehpc-health-checks (its configuration for ND H100 v5), *DLRover* its node check, *Aegis* the
paper of that name (as summarized elsewhere), *docs* the documentation of the vendor or of Linux; *ours* is a proposal
of this project, chosen so that a healthy machine stays far from it.
"""

from __future__ import annotations

import msgspec

MIB = 1 << 20
GIB = 1 << 30


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Every threshold of the node check. Names say the unit: ``_s`` seconds, ``_nbytes`` bytes, ``_rate`` bytes/s."""

    # Processor.
    core_ratio: float = 0.5  # of the median core's speed; ours: an efficiency core has about 0.6
    # Memory.
    available_nbytes: int = 1 * GIB  # ours
    copy_rate: float = 1.0 * GIB  # ours: one core of any server of ten years copies several times that
    # /dev/shm. Docker's default is 64 MB (docs); torch's DataLoader passes every batch through it.
    shm_nbytes: int = 1 * GIB
    # Disk.
    free_nbytes: int = 2 * GIB  # ours
    disk_rate: float = 30.0 * MIB  # ours: half of what an old laptop's disk does
    # A flush to a disk that turns takes about half a turn, 4 ms at 7,200/min; to flash at least a transfer of the bus
    # and a command, tens of microseconds. What returns sooner has not left the kernel.
    flush_rotating_s: float = 1e-3
    flush_s: float = 10e-6
    # Store.
    place_rate: float = 5.0 * MIB  # ours: 1 GiB in 200 s
    # Clocks. 5 ms between nodes is the acceptance figure of this project; sichek's list of missing items asks for 1 ms.
    clock_s: float = 5e-3
    place_clock_s: float = 60.0  # S3 refuses signatures at 15 min (docs)
    # Names.
    resolve_s: float = 1.0  # ours
    ephemeral_ports: int = 4096  # ours; Linux has 28,232 by default (docs)
    # Pairs. DLRover: an elapsed time above twice the median is a straggler's.
    pair_ratio: float = 2.0
    # Accelerators.
    uncorrectable_remaps: int = 512  # Azure: above that, replace
    clock_ratio: float = 0.5  # of the highest SM clock while busy; ours
    device_ratio: float = 0.75  # of the median device's matmul rate; ours, the score below which NVRx flags a rank
    # Kernel log.
    xid_age_s: float = 2 * 3600.0  # Azure looks back 2 h
    # Error counters that grow while one looks.
    link_errors_per_s: float = 1.0  # ours: healthy links count none for hours
    # This node's own earlier record.
    reference_ratio: float = 0.75  # NVRx's score
