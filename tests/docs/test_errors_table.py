"""docs/errors.md covers every kind of error, and says which class has which exit code."""

from __future__ import annotations

import re
from pathlib import Path

from resilient import errors
from resilient.errors import ErrorKind, ResilientError

PAGE = (Path(__file__).parents[2] / "docs/errors.md").read_text()


def rows(first_cell: str) -> list[list[str]]:
    lines = PAGE.partition(f"\n| {first_cell} |")[2].splitlines()[2:]
    table = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def named(cell: str) -> list[str]:
    return re.findall(r"\w+Error", cell)


def test_every_kind_has_a_remedy() -> None:
    documented = rows("kind")
    assert [row[0] for row in documented] == [str(kind) for kind in ErrorKind]
    assert all(row[2] and row[3] for row in documented)


def test_kinds_name_classes_of_the_tree() -> None:
    classes = {name for name in errors.__all__ if name.endswith("Error")}
    assert {name for row in rows("kind") for name in named(row[1])} <= classes


def test_classes_have_these_exit_codes() -> None:
    documented = {row[0]: (row[1], int(row[2])) for row in rows("class")}
    for name, (builtin, exit_code) in documented.items():
        cls = getattr(errors, name)
        assert issubclass(cls, ResilientError)
        assert cls.exit_code == exit_code
        assert not builtin or builtin in [base.__name__ for base in cls.__mro__]
    assert set(documented) == {name for name in errors.__all__ if name.endswith("Error")}


def test_kinds_are_raised_with_the_classes_that_the_table_names() -> None:
    """As far as the source shows it: ``SomeError(... kind=ErrorKind.X ...)`` in one call."""
    documented = {row[0]: named(row[1]) for row in rows("kind")}
    package = Path(errors.__file__).parent
    raised = re.compile(r"\b(\w+Error)\((?:(?!\b\w+Error\().)*?kind=ErrorKind\.(\w+)", re.DOTALL)
    differ = [
        f"{path.name} raises {ErrorKind[member]} as {name}"
        for path in package.rglob("*.py")
        for name, member in raised.findall(path.read_text())
        if name not in documented[ErrorKind[member]]
    ]
    assert not differ
