"""Calling the command in this process, and reading what it says as JSON."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from resilient.cli.main import main


def call(*arguments: object, code: int = 0) -> Result:
    """Call it; fail the test if it ends with another exit code than ``code``."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"exit {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def called(*arguments: object, code: int = 0) -> Any:
    """Call it with ``--json``; return what it says."""
    return json.loads(call(*arguments, "--json", code=code).stdout)
