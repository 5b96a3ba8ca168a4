"""The process in which checks run: told an `Order` on stdin, it answers with a line for each begin and end."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

import msgspec

from resilient.check.context import Context
from resilient.check.result import Result, failed
from resilient.check.suite import Begun, Ended, Order


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not break the answers
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    end_with_parent()
    for name, module in order.checks:
        say(answers, Begun(name))
        say(answers, Ended(name, _results(name, module, order.context)))


def end_with_parent() -> None:
    """End this process and those that it has started, whatever they do, when the one that started it has ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():  # what it has started as well
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="resilient-parent", daemon=True).start()


def _results(name: str, module: str, context: Context) -> list[Result]:
    try:
        found: list[Result] = importlib.import_module(module).check(context)
    except Exception as error:  # noqa: BLE001 -- the main of this process: stored as what the check has found
        why = f"{type(error).__name__}: {error}"
        line, remedy = f"could not be completed: {why}", "see the kernel log; report it if the node is well"
        return [failed(name, line, remedy, doubtful=True)]
    return found


def say(answers: int, message: Begun | Ended) -> None:
    """Write a line; a pipe may take only a part of a long one at once."""
    left = memoryview(msgspec.json.encode(message) + b"\n")
    while left:
        left = left[os.write(answers, left) :]


if __name__ == "__main__":
    main()
