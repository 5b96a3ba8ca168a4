"""What an exception says about a run: whose failure it is, and by what it is recognised when it comes again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from resilient.errors import PeerError, ResilientError
from resilient.format.digest import digest
from resilient.policy.demotion import CODE, ENVIRONMENT, NUMERIC

_MESSAGE: Final = 240
"""Characters that are kept of a message."""

_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|[-+]?\d+(?:[._]\d+)*(?:[eE][-+]?\d+)?")
_NUMERIC: Final = re.compile(r"(?i)\bnan\b|\binf(inity)?\b|non-?finite|not finite|overflow|diverge")
_ENVIRONMENT: Final = re.compile(
    r"(?i)out of memory|CUDA error|cuDNN|NCCL|DataLoader worker .*(exited|killed)|no space"
)
_OTHERS: Final = re.compile(
    r"(?i)connection (closed|reset|refused|was)|broken pipe|closed by peer|socket timeout|timed out (waiting|after)|"
    r"\bgloo\b|process group|watchdog"
)


def first_cause(error: BaseException) -> BaseException | None:
    """Return the failure that an exception of a training function tells of, if it may be the first one of a life.

    None for what only follows from another one (a peer that closed the connection, a signal, an interrupt), for what
    this package refuses, and for an exit.
    """
    if isinstance(error, PeerError) and error.__cause__ is not None:
        error = error.__cause__  # what this rank itself has run into, and told the others
    if not isinstance(error, Exception) or isinstance(error, ResilientError):
        return None
    return None if any(_follows(each) for each in _chain(error)) else error


def is_secondary(error: BaseException) -> bool:
    """Say whether a failure tells that another rank has failed: a collective broke, or the store of the ranks did.

    Not a broken connection as such: the queues of a `DataLoader` have some, too.
    """
    return isinstance(error, Exception) and any(
        _follows(each) and not isinstance(each, ConnectionError) for each in _chain(error)
    )


def cause_of(error: BaseException) -> str:
    """Return what may be to blame for a failure."""
    text = str(error)
    if isinstance(error, ArithmeticError) or _NUMERIC.search(text):
        return NUMERIC
    if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError) or _ENVIRONMENT.search(text):
        return ENVIRONMENT
    return CODE


def fingerprint(error: BaseException) -> str:
    """Return the message of a failure without numbers and addresses: the same when the same failure comes again."""
    return " ".join(_VARYING.sub("#", str(error)).split())[:_MESSAGE]


def program_of(function: Callable[..., Any]) -> str:
    """Return what differs once somebody has changed the source of a training function; "" if that cannot be read."""
    code = getattr(function, "__code__", None)
    try:
        return "" if code is None else digest(Path(code.co_filename).read_bytes()).hex()
    except OSError:
        return ""  # a notebook's cell, or a program that was typed in


def _follows(error: BaseException) -> bool:
    if type(error).__module__.startswith("torch.distributed"):
        return True  # DistBackendError and its like, and the agent's SignalException
    peers = isinstance(error, ConnectionError | PeerError)
    return peers or (isinstance(error, RuntimeError) and _OTHERS.search(str(error)) is not None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
