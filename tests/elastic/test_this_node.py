"""What a node says about itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilient.elastic.this_node import addresses, agreement


@pytest.mark.field_report("BR-195")
def test_an_address_that_is_given_is_the_only_one_and_otherwise_a_name_comes_with_numbers() -> None:
    assert addresses("10.1.2.3") == ("10.1.2.3",)
    found = addresses(None)
    assert len(found) > 1, "a name that others do not know must not be all"
    assert len(set(found)) == len(found)


def test_the_command_is_the_content_of_the_script_and_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str, content: str, *arguments: str) -> str:
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(content)
        monkeypatch.setattr(sys, "argv", ["torchrun", str(script), *arguments])
        return agreement("2", with_command=True, parse=lambda given: given).command

    here = of("a/train.py", "pass", "--lr=1")
    assert here
    assert here == of("b/train.py", "pass", "--lr=1"), "it may lie elsewhere on another node"
    assert here != of("a/train.py", "pass", "--lr=2")
    assert here != of("a/train.py", "fail", "--lr=1")


def test_a_command_that_cannot_be_found_out_is_not_compared() -> None:
    def fail(_: object) -> list[str]:
        raise SystemExit(2)

    assert agreement("2", with_command=True, parse=fail).command == ""
    assert agreement("2", with_command=False, parse=lambda given: given).command == ""
