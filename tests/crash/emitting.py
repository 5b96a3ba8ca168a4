"""A training that writes down each event as soon as it is told: `emit(PLACE, LOG, EVERY_S)`."""

from __future__ import annotations

import json
import os
import time

import torch

import resilient
from resilient.events import Event
from resilient.format.journal import name_of


def emit(place: str, log: str, every_s: float) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(event: Event) -> None:
        line = {"at": time.time(), "event": name_of(type(event)), "step": getattr(event, "step", None)}
        os.write(file, json.dumps(line).encode() + b"\n")

    @resilient.train(place, every=20, journal_every_s=every_s, observers=(write,))
    def train(run: resilient.Run) -> None:
        state = {"x": torch.zeros(4)}
        run.track(state=state)
        for _ in run.steps(range(10**6), total=10**6):
            time.sleep(0.005)
            state["x"] += 1

    train()
