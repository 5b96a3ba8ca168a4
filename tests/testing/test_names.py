"""The promised surface of the kit: all there, and cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import resilient.testing

SOURCE = Path(resilient.testing.__file__)


@pytest.mark.parametrize("name", resilient.testing.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(resilient.testing, name)
    assert found.__name__ == name
    assert found.__doc__
    assert name in dir(resilient.testing)


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    shown = {
        alias.name: node.module
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("resilient.")
        for alias in node.names
    }
    assert shown == vars(resilient.testing)["_HOME"]
    assert sorted(shown) == sorted(resilient.testing.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        resilient.testing.no_such_name  # noqa: B018 -- the access is what is tested


def test_neither_torch_nor_pytest_is_imported_for_the_kit() -> None:
    program = """
import sys
import resilient.testing
from resilient.testing import FaultyStore, ProcessFaults, check_run, kill
assert not {"torch", "pytest", "_pytest"} & set(sys.modules), sorted(sys.modules)
import resilient.testing.plugin
assert "torch" not in sys.modules
assert "resilient.testing.conformance" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_pytest_finds_the_plugin_by_itself() -> None:
    (entry,) = entry_points(group="pytest11", name="resilient")
    assert entry.value == "resilient.testing.plugin"
