"""Which module's parameter a tensor is: the names that optimizer state is kept under."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from resilient.errors import ErrorKind, UsageError
from resilient.state.modules import ExtraState, Slot, slots


class Owners:
    """The parameters of some modules by name, ``<item>.<parameter>``; a tied one has several, the first counts."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.slots: dict[str, list[Slot | ExtraState]] = {item: slots(item, module) for item, module in modules.items()}
        self.parameters: dict[str, Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for item, content in self.slots.items():
            for slot in content:
                if isinstance(slot, Slot):
                    name = f"{item}.{slot.name}"
                    if self.parameters.setdefault(name, slot.tensor) is not slot.tensor:
                        raise UsageError(
                            f"two parameters are called {name}",
                            kind=ErrorKind.NAME_COLLISION,
                            hint="rename one of the items",
                        )
                    self._names.setdefault(id(slot.tensor), []).append(name)

    def names(self, item: str, parameter: Tensor) -> list[str]:
        """Return all names of an optimizer's parameter; raise `UsageError` if no module here owns it."""
        found = self._names.get(id(parameter))
        if found is None:
            raise UsageError(
                f"{item}: optimizes a parameter of shape {tuple(parameter.shape)} that no module beside it owns"
                f" ({', '.join(self.slots) or 'there are none'})",
                kind=ErrorKind.UNOWNED_PARAMETER,
                hint="pass the module beside its optimizer, and make the optimizer after the module's last change"
                " (fully_shard, to, tied or replaced layers)",
            )
        return found
