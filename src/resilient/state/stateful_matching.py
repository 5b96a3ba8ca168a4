"""Give objects back the state that they keep themselves: ``load_state_dict`` and ``set_extra_state``."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from resilient.format.documents import Tensor
from resilient.state.matching import NOTHING, Matching
from resilient.state.modules import ExtraState
from resilient.state.tensors import dtype_of, empty_like
from resilient.state.trees import leaves, name_of


class Stateful(Protocol):
    """What keeps its own state."""

    def load_state_dict(self, state_dict: dict[Any, Any], /) -> Any: ...


def match_stateful(stateful: Stateful, now: dict[Any, Any], match: Matching) -> None:
    """Plan to call ``load_state_dict`` with what was saved, in fresh containers and tensors.

    ``now``, its present ``state_dict()``, says where tensors go. A key that it has and the checkpoint lacks is missing;
    one that only the checkpoint has is passed on: objects make state as they go.
    """
    template = {leaf.path: leaf.content for leaf in leaves(now)}
    if isinstance(stateful, torch.amp.GradScaler) and not stateful.is_enabled():
        # Its load_state_dict would drop the saved scale without a word.
        return
    saved = {path for _, path in match.paths()}
    above = {path[:length] for path in saved for length in range(len(path) + 1)}
    for path in template:
        below_saved = any(path[:length] in saved for length in range(1, len(path) + 1))
        if path not in above and not below_saved:
            match.plan.missing.append(f"{match.item}.{name_of(path)}")
    content = match.rebuild((), lambda path, saved: _room(template.get(path), saved))
    match.plan.installs.append(lambda: stateful.load_state_dict(content))


def match_extra_state(extra: ExtraState, match: Matching) -> None:
    """Plan to call ``set_extra_state`` with what was saved."""
    template = {leaf.path: leaf.content for leaf in leaves({extra.name: extra.owner.get_extra_state()})}
    content = match.rebuild((extra.name,), lambda path, saved: _room(template.get(path), saved))
    if content is NOTHING:
        match.plan.missing.append(f"{match.item}.{extra.name}")
    else:
        match.plan.installs.append(lambda: extra.owner.set_extra_state(content))


def _room(now: object, saved: Tensor) -> torch.Tensor:
    """Return a fresh tensor like the present one, or like the saved one where there is none.

    An empty tensor is what state looks like that grows later, so any shape fits it. Where the saved one does not fit,
    the caller notes the difference.
    """
    dtype = dtype_of(saved.dtype)
    if not isinstance(now, torch.Tensor):
        return torch.empty(saved.shape, dtype=dtype)
    if now.numel() == 0 and now.dtype == dtype:
        return torch.empty(saved.shape, dtype=dtype, device=now.device)
    return empty_like(now, now.dtype)
