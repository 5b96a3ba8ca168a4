"""A state lies where the program has put it; what device was in use when it was saved is of no importance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import resilient
from resilient.store.local import LocalStore


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.field_report("BR-164")
def test_a_restore_fills_what_is_there_whatever_the_current_device(tmp_path: Path) -> None:
    model, optimizer = trained()
    other, its_optimizer = trained()
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    with torch.device("meta"):  # what is made without saying where has no memory
        resilient.save(tmp_path, 1, {"model": model, "optimizer": optimizer}).wait(30)
        resilient.load(tmp_path, {"model": other, "optimizer": its_optimizer})
    for name, tensor in other.state_dict().items():
        assert tensor.data_ptr() == places[name]
        assert torch.equal(tensor, model.state_dict()[name])
    for one, two in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    store = LocalStore(tmp_path)
    assert not [key for key in store.list("steps/") if b"cpu" in store.get(key)], "what was saved where is not stored"
