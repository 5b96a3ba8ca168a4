"""The exception tree: its shape, its exit codes, and that errors survive the way to another process."""

from __future__ import annotations

import copy
import pickle
import re
import traceback

import pytest

from resilient import errors
from resilient.errors import (
    ConflictError,
    CorruptError,
    ErrorKind,
    NotFoundError,
    PeerError,
    ResilientError,
    StoreError,
    UsageError,
)

TREE: dict[type[ResilientError], tuple[type[Exception] | None, int]] = {
    UsageError: (ValueError, 2),
    NotFoundError: (LookupError, 10),
    ConflictError: (None, 11),
    CorruptError: (None, 12),
    StoreError: (OSError, 13),
    PeerError: (None, 14),
}


def all_below(cls: type[ResilientError]) -> set[type[ResilientError]]:
    return {cls}.union(*(all_below(sub) for sub in cls.__subclasses__()))


def test_the_tree_has_this_shape_and_no_other_class() -> None:
    assert ResilientError.exit_code == 1
    for cls, (builtin, exit_code) in TREE.items():
        assert cls.__bases__ == ((ResilientError,) if builtin is None else (ResilientError, builtin))
        assert cls.exit_code == exit_code
    assert all_below(ResilientError) == {ResilientError, *TREE}


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    tree: list[type[ResilientError]] = [ResilientError, *TREE]
    drawn = re.findall(r"(\w+Error) +exit +(\d+)", errors.__doc__ or "")
    assert drawn == [(cls.__name__, str(cls.exit_code)) for cls in tree]


def test_except_exception_around_a_save_catches_what_we_raise() -> None:
    assert issubclass(ResilientError, Exception)


@pytest.mark.parametrize("cls", [ResilientError, *TREE], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_crosses_processes_with_all_that_it_says(cls: type[ResilientError], protocol: int) -> None:
    error = cls("step 3: object data/x is gone", kind=ErrorKind.IO, hint="take an older step", rank=2)
    if isinstance(error, StoreError):
        error.retryable = True
    for back in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(back) is cls
        assert str(back) == str(error) == "step 3: object data/x is gone"
        assert (back.kind, back.hint, back.rank) == (ErrorKind.IO, "take an older step", 2)
        assert getattr(back, "retryable", None) == getattr(error, "retryable", None)
        assert back.__notes__ == [f"kind: {back.kind}", "hint: take an older step"]


def test_a_traceback_ends_with_the_hint() -> None:
    error = UsageError("no such thing", kind=ErrorKind.INVALID_ARGUMENT, hint="try another")
    assert traceback.format_exception(error)[-1].strip().endswith("hint: try another")


def test_kinds_are_kebab_case_and_told_apart() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", kind) for kind in ErrorKind)
    assert len(set(ErrorKind)) == len(ErrorKind.__members__)
