"""Give an optimizer back its groups and its state, by parameter names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from resilient.format.documents import Tensor
from resilient.state.groups import continued
from resilient.state.matching import NOTHING, Matching
from resilient.state.optimizers import split_group
from resilient.state.owners import Owners
from resilient.state.tensors import dtype_name, dtype_of, empty_like
from resilient.state.trees import Path, leaves

CPU = torch.device("cpu")


class OptimizerMatching:
    """Plans to restore an optimizer as a whole.

    Nothing goes through ``Optimizer.load_state_dict``: that casts state to the parameter's dtype, and matches by index.
    A parameter that is optimized on one side only is accepted if it was, or is, frozen on the other side, and reported.
    """

    def __init__(
        self, optimizer: Optimizer, match: Matching, owners: Owners, saved_parameters: Collection[str]
    ) -> None:
        self._optimizer = optimizer
        self._match = match
        self._owners = owners
        self._saved_parameters = saved_parameters  # of all items, ``<item>.<name>``: what was there, optimized or not
        self._saved_groups: list[list[str]] = []
        while (name := f"param_groups.{len(self._saved_groups)}") in match.values:
            self._saved_groups.append(list(match.peek(name)["params"]))
        self._optimized = {name for group in self._saved_groups for name in group}

    def plan(self) -> None:
        """Plan every group, every parameter's state, and what is kept under other keys."""
        groups = [[self._name(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]
        sources = continued(groups, self._saved_groups)
        for index, group in enumerate(self._optimizer.param_groups):
            flags = self._plan_group(index, group, sources[index])
            on_device = bool(flags.get("capturable") or flags.get("fused"))
            for parameter, name in zip(group["params"], groups[index], strict=True):
                self._plan_state(parameter, name, step_on_device=on_device)
        self._account_for({name for group in groups for name in group}, {i for each in sources for i in each})
        other = self._match.rebuild(("other",), lambda _, saved: _empty(saved, CPU))
        if other is not NOTHING:
            self._match.plan.installs.append(lambda: self._optimizer.state.update(other))

    def _name(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name: of a tied one, that under which it was optimized when this was saved."""
        names = self._owners.names(self._match.item, parameter)
        return next((name for name in names if name in self._optimized), names[0])

    def _plan_group(self, index: int, group: dict[str, Any], sources: tuple[int, ...]) -> dict[str, Any]:
        """Plan a group's hyperparameters; return those that it will have."""
        label = f"{self._match.item}.param_groups.{index}"
        if len(sources) > 1:
            self._match.plan.different.append(
                f"{label}: its parameters were in the groups {', '.join(map(str, sources))} when saved"
            )
        elif not sources and not group["params"]:
            self._match.plan.missing.append(f"{label} (an empty group)")
        elif not sources:
            self._match.notices.append(
                f"{label}: none of its parameters was optimized when this was saved: it stays as it is"
            )
        if len(sources) != 1:
            return group
        parameter = next(iter(group["params"]), None)
        on_device = parameter is not None and bool(group.get("capturable") or group.get("fused"))
        device = parameter.device if on_device and parameter is not None else CPU
        now = _tensors(split_group(group)[1])

        def destination(path: Path, saved: Tensor) -> torch.Tensor:
            there = _there(now, path, saved)
            return _empty(saved, device) if there is None else there

        content: dict[str, Any] = self._match.rebuild(("param_groups", sources[0]), destination)
        hyperparameters = {key: value for key, value in content.items() if key != "params"}
        self._match.plan.installs.append(lambda: group.update(hyperparameters))
        return hyperparameters

    def _plan_state(self, parameter: torch.Tensor, name: str, *, step_on_device: bool) -> None:
        """Plan the state of one parameter: exactly what was saved, and nothing of what is there now besides."""
        state, match = self._optimizer.state, self._match
        if name not in self._optimized:
            self._plan_unsaved(parameter, name)
            return
        now = _tensors(state.get(parameter, {}))

        def destination(path: Path, saved: Tensor) -> torch.Tensor:
            # step stays on the CPU unless the optimizer's kernels read it on the device; torch has the same rule.
            is_step = path[2:] == ("step",)
            device = parameter.device if step_on_device or not is_step else CPU
            there = _there(now, path, saved)
            if there is not None and there.device == device:
                return there
            return _empty_like(parameter, saved) if not is_step else _empty(saved, device)

        content = match.rebuild(("state", name), destination)
        if content is not NOTHING:
            if not parameter.requires_grad:
                match.notices.append(f"{match.item}: {name} has state of training, and is frozen now")
            match.plan.installs.append(lambda: _refill(state[parameter], content))
        elif parameter in state:
            match.notices.append(f"{match.item}: {name} had no state when this was saved: the present one is dropped")
            match.plan.installs.append(lambda: state.pop(parameter, None))

    def _plan_unsaved(self, parameter: torch.Tensor, name: str) -> None:
        match = self._match
        if name not in self._saved_parameters:
            match.plan.missing.append(f"{match.item}.state.{name}")
            return
        match.notices.append(f"{match.item}: {name} was not optimized when this was saved: its state starts fresh")
        match.plan.installs.append(lambda: self._optimizer.state.pop(parameter, None))

    def _account_for(self, names: set[str], continues: set[int]) -> None:
        """Accept what was saved of parameters that are frozen now; list the others that are not optimized any more."""
        match = self._match
        for name in sorted(self._optimized - names):
            parameter = self._owners.parameters.get(name)
            if parameter is not None and not parameter.requires_grad:
                match.notices.append(f"{match.item}: {name} is frozen now: its saved state is not used")
                match.accept(("state", name))
            elif not match.has(("state", name)):
                match.plan.unexpected.append(f"{match.item}.state.{name} (optimized, but without state yet)")
        for index, saved in enumerate(self._saved_groups):
            if saved and index not in continues:
                match.accept(("param_groups", index))  # its parameters have just been listed one by one


def _tensors(tree: Mapping[Any, Any]) -> dict[Path, torch.Tensor]:
    return {leaf.path: leaf.content for leaf in leaves(tree) if leaf.is_tensor}


def _there(now: Mapping[Path, torch.Tensor], path: Path, saved: Tensor) -> torch.Tensor | None:
    """Return the tensor that is at a path already, if the saved one fits into it exactly: it is filled in place."""
    tensor = now.get(path[2:])
    fits = tensor is not None and dtype_name(tensor.dtype) == saved.dtype and tuple(tensor.shape) == saved.shape
    return tensor if fits else None


def _empty(saved: Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(saved.shape, dtype=dtype_of(saved.dtype), device=device)


def _empty_like(parameter: torch.Tensor, saved: Tensor) -> torch.Tensor:
    """Return room for state: laid out like the parameter where it has its shape, else plain."""
    if saved.shape != tuple(parameter.shape):
        return _empty(saved, parameter.device)
    return empty_like(parameter, dtype_of(saved.dtype))


def _refill(state: dict[Any, Any], content: dict[Any, Any]) -> None:
    state.clear()
    state.update(content)
