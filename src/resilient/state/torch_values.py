"""The types of torch that are values, not tensors: taught to the codec by importing this module."""

from __future__ import annotations

import torch

from resilient.format import values
from resilient.state.tensors import dtype_name, dtype_of

values.register(torch.dtype, "torch.dtype", dtype_name, dtype_of)
values.register(torch.Size, "torch.Size", list, torch.Size)
values.register(torch.device, "torch.device", str, torch.device)
