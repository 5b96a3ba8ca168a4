"""How a run starts: the process group and the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from resilient.config import Settings, read_process
from resilient.run import opening
from resilient.run.opening import process_group


@pytest.mark.field_report("BR-074")
def test_the_device_is_chosen_by_the_rank_within_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(("group", backend)))
    monkeypatch.setattr(opening, "rendezvous", lambda _: iter([(dist.HashStore(), 5, 8)]))
    monkeypatch.setattr(opening, "meet", lambda *_, **__: "this-life")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(("end", None)))
    launcher = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    with process_group(read_process(launcher), Settings()):
        assert calls == [("device", 1), ("group", "cpu:gloo,cuda:nccl")]
    assert calls[-1] == ("end", None)
