"""Accounts of runs made by hand, for what shows them."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np

from resilient.report.model import (
    End,
    GenerationTime,
    Incident,
    Ledger,
    MachineSeries,
    Note,
    Part,
    PictureTime,
    Promise,
    RestoreTime,
    SaveTime,
    Stake,
)

BOTTLENECK = "A step spends 61 % computing and 22 % in exchange; rank 5 on node-b computes longer, and the others wait."
BEGAN_S = 1_796_128_200.0  # 2026-12-01 12:30:00 UTC
GIB = 1 << 30

FAILURES = (  # class, confidence, rank, node, why, proof, action, sources
    ("device-hardware", "certain", 5, "node-b", "rank 5 reported an uncorrectable error of its memory first",
     ("rank 5: CUDA error: uncorrectable ECC error", "NVRM: Xid (PCI:0000:3b:00): 48"), "exclude-node", "memory"),
    ("user-error", "certain", 2, "node-a", "rank 2 raised ValueError in its data loader",
     ("rank 2: ValueError: sample 118 has 3 channels, not 4", "train.py:88 collate (user)"), "restart", "store"),
    ("network", "likely", 6, "node-b", "rank 6 lost its connections before all others",
     ("rank 6: NCCL WARN NET/IB: Got completion with error 12",), "retry", "memory"),
    ("hang", "likely", 3, "node-a", "all others waited for rank 3, which did not enter the collective",
     ("rank 3: in section 'forward' for 64 s", "rank 0: waits in all_reduce"), "restart", "memory"),
    ("host-oom", "certain", 7, "node-b", "the kernel ended rank 7 for want of memory",
     ("rank 7: process ended by SIGKILL", "oom_kill rose from 0 to 1"), "restart", "store"),
    ("node-lost", "likely", 4, "node-b", "node-b left no sign; its four ranks vanished at once",
     ("node-b: silent for 15 s",), "exclude-node", "store"),
)  # fmt: skip


@cache
def rich(seed: int = 1) -> Ledger:
    """Return 3 hours of 10,000 steps on 8 ranks of 2 nodes: 6 failures, machine samples at 10 Hz."""
    draw = random.Random(seed)
    wall_s, world = 10_800.0, 8
    lost = (150, 40, 95, 210, 60, 120)
    cuts = (1500.0, 3300.0, 4700.0, 6900.0, 8100.0, 9600.0)
    generations: list[GenerationTime] = []
    incidents: list[Incident] = []
    saves: list[SaveTime] = []
    restores: list[RestoreTime] = []
    pictures: list[PictureTime] = []
    total: Counter[Part] = Counter()
    step_s = 1.0
    step, began = 0, 0.0
    for number in range(1, 8):
        failed = number < 7
        ended = cuts[number - 1] if failed else wall_s
        lost_steps = lost[number - 1] if failed else 0
        parts = {Part.START: 22.0 + number, Part.DETECTION: 9.0 * number if failed else 0.0}
        parts |= {Part.REFORMATION: 6.0, Part.RESTORE: 4.5} if number > 1 else {}
        parts[Part.LOST] = lost_steps * step_s
        count = int((ended - began - sum(parts.values())) // (12 * step_s))
        parts[Part.SAVE] = 0.18 * count
        training_s = ended - began - sum(parts.values())
        for part, share in ((Part.COMPUTE, 0.63), (Part.EXCHANGE, 0.28), (Part.DATA, 0.07), (Part.OUTSIDE, 0.02)):
            parts[part] = training_s * share
        resumed = step if number > 1 else None
        kept = step + int(training_s // step_s) if failed else 10_000
        last = kept + lost_steps
        begins = BEGAN_S + began + parts[Part.START] + parts.get(Part.REFORMATION, 0.0) + parts.get(Part.RESTORE, 0.0)
        generations.append(
            GenerationTime(
                generation=number, nonce=f"{number:032x}", world_size=world if number != 7 else 4,
                hosts=("node-a", "node-b") if number != 7 else ("node-a",),
                began_s=BEGAN_S + began, ended_s=BEGAN_S + ended, resumed_step=resumed, last_step=last,
                kept_step=kept if failed else None, end=End.FAILED if failed else End.RUNNING, parts=parts,
            )
        )  # fmt: skip
        total.update(parts)
        if failed:
            name, confidence, rank, node, why, proof, action, source = FAILURES[number - 1]
            sources = ((source if source == "memory" else "s3://bucket/runs/gpt-13b", 37 * GIB),)
            costs = {Part.LOST: lost_steps * step_s, Part.DETECTION: parts[Part.DETECTION], Part.START: 23.0 + number,
                     Part.REFORMATION: 6.0, Part.RESTORE: 4.5}  # fmt: skip
            incidents.append(
                Incident(
                    at_s=BEGAN_S + ended - parts[Part.DETECTION], generation=number, failure=name,
                    confidence=confidence, rank=rank, node=node, why=why, proof=proof, action=action,
                    because=f"{name}, the first in a row without progress", last_step=last, resumed_step=kept,
                    lost_steps=lost_steps, parts=costs, sources=sources,
                )
            )  # fmt: skip
            restores.append(
                RestoreTime(at_s=BEGAN_S + ended + 31 + number, generation=number + 1, step=kept, nbytes=37 * GIB,
                            duration_s=4.5, sources=sources)
            )  # fmt: skip
        at = begins + 120
        while at < BEGAN_S + ended:
            stall = 0.15 + draw.random() * 0.06 + (0.9 if draw.random() < 0.03 else 0.0)
            persist = 9.0 + 3 * draw.random() + (12 if draw.random() < 0.05 else 0)
            bad = draw.random() < 0.02
            here = step + int((at - begins) / (BEGAN_S + ended - begins) * (last - step))
            saves.append(
                SaveTime(at_s=at, generation=number, step=here, reason="every", nbytes=37 * GIB,
                         stall_s=stall, persist_s=None if bad else persist, commit_s=None if bad else persist + 0.4,
                         sent=None if bad else 9 * GIB, cpu_s=None if bad else 4.0,
                         error="the store refused part 7: 503 SlowDown" if bad else None)
            )  # fmt: skip
            at += 120
        at = begins
        while at < BEGAN_S + ended:
            for rank in range(world if number != 7 else 4):
                slow = 0.07 if rank == 5 and number > 3 else 0.0
                compute = 0.61 + slow + 0.02 * draw.random()
                pictures.append(
                    PictureTime(at_s=at, generation=number, rank=rank, step=step + int(at - begins), step_s=1.0,
                                compute_s=compute, exchange_s=0.9 - compute - 0.04, data_s=0.07, optimizer_s=0.06,
                                save_s=0.01)
                )  # fmt: skip
            at += 15
        step, began = kept, ended
    return Ledger(
        url="s3://bucket/runs/gpt-13b", run_id="b7c1" * 8, began_s=BEGAN_S, as_of_s=BEGAN_S + wall_s, step=10_000,
        parts=dict(total), generations=tuple(generations), incidents=tuple(incidents), saves=tuple(saves),
        restores=tuple(restores), pictures=tuple(pictures), machines=machines(generations),
        stakes=(
            Stake(what="a process", step=9_985, source="memory", lost_s=15.0),
            Stake(what="a node", step=9_900, source="store", lost_s=100.0),
            Stake(what="the job", step=9_900, source="store", lost_s=100.0),
        ),
        notes=(
            Note(at_s=BEGAN_S + 5200, generation=4, rank=0, kind="straggler", message="rank 5 is slow in forward"),
            Note(at_s=BEGAN_S + 6800, generation=4, rank=0, kind="hang", message="rank 3 has been in forward for 64 s"),
        ),
        ettr_hours=tuple((BEGAN_S + at, 0.9 - 0.08 * math.sin(at / 1500)) for at in range(300, 10_801, 60)),
        bottleneck=BOTTLENECK,
        promise=Promise(promised=0.95, delivered=0.865, largest=Part.LOST, message="86.5 % of 95 %"),
        missing=("rank 3 of generation 4 has written nothing for its last 9 s",),
    )  # fmt: skip


def machines(generations: list[GenerationTime]) -> tuple[MachineSeries, ...]:
    """Return samples at 10 Hz of both nodes: power goes down while bytes are sent, once a second."""
    noise = np.random.default_rng(7)
    found = []
    for one in generations:
        for place, host in enumerate(one.hosts):
            count = int((one.ended_s - one.began_s) * 10)
            times = one.began_s + 0.1 * np.arange(count)
            sending = (times + 0.05 * place) % 1.0 > 0.75
            values = {
                "cpu": 0.22 + 0.03 * noise.standard_normal(count) + 0.1 * sending,
                "accelerator": np.where(sending, 0.35, 0.97),
                "power_w": np.where(sending, 1400.0, 2650.0) + 60 * noise.standard_normal(count),
                "sent_Bps": np.where(sending, 11e9, 0.1e9) * (1 + 0.05 * noise.standard_normal(count)),
                "received_Bps": np.where(sending, 10.8e9, 0.1e9) * (1 + 0.05 * noise.standard_normal(count)),
            }
            values["power_w"][: min(count, 200)] = np.nan
            clean = {name: tuple(np.maximum(series, 0).tolist()) for name, series in values.items()}
            found.append(
                MachineSeries(host=host, generation=one.generation, began_s=one.began_s, period_s=0.1, values=clean)
            )
    return tuple(found)


def empty() -> Ledger:
    """Return a run that has not begun."""
    return Ledger(url="/runs/new", run_id="0" * 32, began_s=BEGAN_S, as_of_s=BEGAN_S, step=0, parts={}, generations=())


def calm(end: End = End.DONE) -> Ledger:
    """Return 20 minutes in which nothing has failed."""
    parts = {Part.START: 12.0, Part.COMPUTE: 1000.0, Part.EXCHANGE: 120.0, Part.DATA: 60.0, Part.SAVE: 8.0}
    one = GenerationTime(
        generation=1, nonce="1" * 32, world_size=2, hosts=("node-a",), began_s=BEGAN_S, ended_s=BEGAN_S + 1200,
        resumed_step=None, last_step=2360, kept_step=None, end=end, parts=parts,
    )  # fmt: skip
    saves = tuple(
        SaveTime(at_s=BEGAN_S + at, generation=1, step=2 * at, reason="every", nbytes=GIB, stall_s=0.02,
                 persist_s=1.5, commit_s=1.6, sent=GIB // 2)
        for at in range(100, 1100, 100)
    )  # fmt: skip
    return Ledger(
        url="/runs/calm", run_id="a" * 32, began_s=BEGAN_S, as_of_s=BEGAN_S + 1200, step=2360, parts=parts,
        generations=(one,), saves=saves, stakes=(Stake(what="the job", step=2000, source="store", lost_s=180.0),),
    )  # fmt: skip


def running() -> Ledger:
    """Return a run that goes on, with a save on its way."""
    ledger = calm(End.RUNNING)
    flying = replace(ledger.saves[-1], at_s=ledger.as_of_s - 2, step=2350, persist_s=None, commit_s=None)
    return replace(ledger, saves=(*ledger.saves, flying))


def large() -> Ledger:
    """Return a run of 512 ranks on 64 nodes with 200 generations, each of which has failed."""
    few = rich()
    nodes = tuple(f"node-{number:03d}.cluster.example.org" for number in range(64))
    lives, incidents = [], []
    for number in range(200):
        began = BEGAN_S + 54.0 * number
        parts = {Part.START: 10.0, Part.COMPUTE: 40.0, Part.DETECTION: 4.0}
        lives.append(
            replace(few.generations[0], generation=number + 1, hosts=nodes, world_size=512, began_s=began,
                    ended_s=began + 54, resumed_step=50 * number, last_step=50 * number + 55,
                    kept_step=50 * number + 50, parts=parts)
        )  # fmt: skip
        incidents.append(replace(few.incidents[number % 6], generation=number + 1, at_s=began + 50))
    pictures = [
        replace(one, rank=rank, exchange_s=0.2 + rank / 2000) for rank in range(512) for one in few.pictures[:40:8]
    ]
    machines_ = tuple(
        MachineSeries(host=host, generation=1, began_s=BEGAN_S, period_s=10.0, values={"cpu": (0.1, 0.3) * 500})
        for host in nodes
    )
    return replace(
        few, generations=tuple(lives), incidents=tuple(incidents), pictures=tuple(pictures), machines=machines_,
        parts={Part.START: 2000.0, Part.COMPUTE: 8000.0, Part.DETECTION: 800.0},
    )  # fmt: skip


HOSTILE = "</pre></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m\u202e\"'&\x00"


def hostile() -> Ledger:
    """Return a run whose every word wants to be something else."""
    ledger = rich()
    bad = replace(
        ledger.incidents[0], why=HOSTILE, proof=(HOSTILE, f"Traceback:\n  {HOSTILE}"), node=HOSTILE, because=HOSTILE,
        failure=HOSTILE, confidence=HOSTILE, action=HOSTILE, sources=((HOSTILE, 5),),
    )  # fmt: skip
    return replace(
        ledger,
        url=f"/runs/{HOSTILE}", run_id=HOSTILE, incidents=(bad,), bottleneck=HOSTILE, missing=(HOSTILE,),
        generations=tuple(replace(one, hosts=(HOSTILE,)) for one in ledger.generations),
        saves=tuple(replace(one, error=HOSTILE, reason=HOSTILE) for one in ledger.saves[:5]),
        restores=tuple(replace(one, sources=((HOSTILE, 9),)) for one in ledger.restores),
        notes=(Note(at_s=BEGAN_S + 9, generation=1, rank=0, kind=HOSTILE, message=HOSTILE),),
        machines=tuple(replace(one, host=HOSTILE) for one in ledger.machines[:1]),
        stakes=(Stake(what=HOSTILE, step=3, source=HOSTILE, lost_s=1.0),),
    )  # fmt: skip
