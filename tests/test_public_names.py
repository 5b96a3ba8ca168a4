"""The promised surface: few names, all there, cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import resilient

SOURCE = Path(resilient.__file__)


def test_there_are_at_most_twenty_public_names() -> None:
    assert len(resilient.__all__) == len(set(resilient.__all__)) <= 20


@pytest.mark.parametrize("name", resilient.__all__)
def test_every_public_name_is_there_and_lives_where_it_says(name: str) -> None:
    assert getattr(resilient, name).__name__ == name
    assert name in dir(resilient)


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    shown = {
        alias.name: node.module
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("resilient.")
        for alias in node.names
    }
    assert shown == vars(resilient)["_HOME"]
    assert sorted(shown) == sorted(resilient.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        resilient.no_such_name  # noqa: B018 -- the access is what is tested


def test_importing_resilient_is_lazy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import resilient; resilient.ResilientError; resilient.__version__"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "resilient" in imported
    assert not imported & {"torch", "numpy", "fsspec", "s3fs", "click", "rich", "msgspec"}
