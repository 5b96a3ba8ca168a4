"""Tensors whose layout surprises."""

from __future__ import annotations

import torch

from resilient.state.tensors import flat


def test_a_tensor_of_one_element_is_flat_whatever_its_strides_are() -> None:
    part = torch.arange(8, dtype=torch.float64).reshape(4, 2).t()[:1, :1]
    assert part.is_contiguous()
    assert part.stride() == (1, 2), "what view() refuses"
    assert flat(part).view(torch.uint8).numel() == 8
    assert flat(part).data_ptr() == part.data_ptr()
