"""Which saved parameter groups each group of an optimizer continues: matched by parameter names."""

from __future__ import annotations

from collections.abc import Sequence


def continued(names: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return, for each group now, the indices of the saved groups that its parameters were in.

    Args:
        names: the groups now, by the names that their parameters have in the checkpoint.
        saved: the saved groups' parameter names.

    The order of groups and of the parameters in them may differ. An empty group is matched by its position among the
    empty ones.
    """
    home = {name: index for index, group in enumerate(saved) for name in group}
    empty = iter([index for index, group in enumerate(saved) if not group])
    found: list[tuple[int, ...]] = []
    for group in names:
        if group:
            found.append(tuple(sorted({home[name] for name in group if name in home})))
        else:
            index = next(empty, None)
            found.append(() if index is None else (index,))
    return found
