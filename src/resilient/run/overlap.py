"""Which tensors may be copied while the next turn runs, and where that has to be over."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilient.engine.stage import Staging
from resilient.format.dtypes import ITEMSIZE
from resilient.state.items import declared, unwrapped
from resilient.state.leaves import Captured, TensorLeaf
from resilient.state.owners import Owners
from resilient.state.wrappers import AfterStep

_SMALL_NBYTES: Final = 4 << 10
"""What is smaller is copied at once: that costs less than to look after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What `Overlap.leaves` has found, and what it depends on."""

    tensors: tuple[TensorLeaf, ...]
    stepped: frozenset[str]
    torn: frozenset[tuple[str, str]]
    frozen: Sequence[weakref.ref[Tensor]]
    leaves: frozenset[int]


class Overlap:
    """Knows what changes in ``optimizer.step()`` only, and makes every such step wait for the copy that is under way.

    Those are the parameters and the state of tracked optimizers that stepped, by calling ``step``, in the turn before
    (a replayed CUDA graph calls nothing), the frozen parameters beside them, and what was declared `AfterStep`. The
    waiting is done before the first step of any optimizer, at the end of the turn, or when `fence` is called.

    Hooks are removed by `close`.
    """

    def __init__(self, items: Mapping[str, object], *, enabled: bool = True) -> None:
        self._modules = {name: inner for name, item in items.items() if isinstance(inner := unwrapped(item), nn.Module)}
        self._optimizers = {name: o for name, item in items.items() if isinstance(o := unwrapped(item), Optimizer)}
        self._declared = frozenset(name for name, item in items.items() if declared(item, AfterStep))
        self._enabled = enabled
        self._stepping: set[str] = set()
        self._stepped: frozenset[str] = frozenset()  # in the turn before
        self._torn: set[tuple[str, str]] = set()
        self._known: _Known | None = None
        self._staging: Staging | None = None
        self._fencing = threading.Lock()
        self.waited_s = 0.0
        self._hooks = [
            optimizer.register_step_post_hook(functools.partial(self._after_step, name))
            for name, optimizer in self._optimizers.items()
        ]
        if enabled:
            self._hooks.append(register_optimizer_step_pre_hook(self._before_step))

    def leaves(self, captured: Captured) -> frozenset[int]:
        """Return which of the captured tensors may be read until the next fence."""
        if not self._enabled:
            return frozenset()
        known = self._known
        torn = frozenset(self._torn)
        if (
            known is None
            or known.tensors is not captured.tensors
            or (known.stepped, known.torn) != (self._stepped, torn)
            or any(each is None or each.requires_grad for each in (ref() for ref in known.frozen))
        ):
            known = self._known = self._found(captured, torn)
        return known.leaves

    def watch(self, staging: Staging) -> None:
        """Wait for this copy at the next fence; what turns out to be torn in it never overlaps again."""
        self.waited_s = 0.0
        self._staging = staging
        staging.done.add_done_callback(lambda _: self._torn.update(staging.torn))

    def fence(self) -> float:
        """Return when tensors may change; say how many seconds it took. From any thread."""
        with self._fencing:  # backward passes of several devices may come here at once: all have to wait
            staging = self._staging
            if staging is None:
                return 0.0
            waited_s = staging.fence()
            self.waited_s += waited_s
            self._staging = None
        return waited_s

    def end_turn(self) -> float:
        """End a turn: what has stepped in it may overlap with the next one.

        Waits for the copy of the last boundary, if no step has; returns the seconds that both have waited for it.
        """
        self.fence()
        self._stepped = frozenset(self._stepping)
        self._stepping.clear()
        return self.waited_s

    def close(self) -> None:
        """Wait for the copy that is under way, and remove the hooks. Idempotent."""
        self.fence()
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, *_: object) -> None:
        self.fence()

    def _after_step(self, name: str, *_: object) -> None:
        self._stepping.add(name)

    def _found(self, captured: Captured, torn: frozenset[tuple[str, str]]) -> _Known:
        parameters = Owners(self._modules).parameters
        stepped = self._parameters_of(self._stepped)
        owned = self._parameters_of(self._optimizers)
        trained = {name for name, each in self._modules.items() if any(id(p) in owned for p in each.parameters())}
        found: list[int] = []
        frozen: list[weakref.ref[Tensor]] = []
        for number, leaf in enumerate(captured.tensors):
            if leaf.alias is not None or (leaf.item, leaf.name) in torn or _nbytes(leaf) < _SMALL_NBYTES:
                continue
            tensor = parameters.get(f"{leaf.item}.{leaf.name}") if leaf.item in self._modules else None
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and leaf.item in trained:
                frozen.append(weakref.ref(tensor))
                found.append(number)
            elif id(tensor) in stepped or leaf.item in self._declared or self._is_state(leaf):
                found.append(number)
        return _Known(
            tensors=captured.tensors, stepped=self._stepped, torn=torn, frozen=frozen, leaves=frozenset(found)
        )

    def _is_state(self, leaf: TensorLeaf) -> bool:
        # Not what the groups hold: a tensor that is the learning rate is set by its scheduler.
        return leaf.item in self._stepped and leaf.path[0] == "state"

    def _parameters_of(self, names: Iterable[str]) -> set[int]:
        return {id(each) for name in names for group in self._optimizers[name].param_groups for each in group["params"]}


def _nbytes(leaf: TensorLeaf) -> int:
    return leaf.box.volume * ITEMSIZE[leaf.dtype]
