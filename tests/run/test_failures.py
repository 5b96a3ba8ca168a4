"""Whose failure an exception tells of, and how it is recognised when it comes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

import resilient
from resilient.catalog.outcomes import read_outcome
from resilient.errors import ErrorKind, PeerError, StoreError, UsageError
from resilient.policy.demotion import CODE, ENVIRONMENT, NUMERIC
from resilient.run.failures import cause_of, fingerprint, first_cause, program_of
from resilient.run.session import Run
from resilient.store.local import LocalStore


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(1),
        SignalException("Process 12 got signal: 15", sigval=15),  # type: ignore[arg-type]  # an int does here
        dist.DistBackendError("NCCL communicator was aborted"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("Socket Timeout"),
        ConnectionResetError("Connection reset by peer"),
        PeerError("no answer from rank 1", kind=ErrorKind.PEER_TIMEOUT),
        UsageError("the shapes differ", kind=ErrorKind.MISMATCH),
        StoreError("5 saves in a row failed", kind=ErrorKind.SAVE_FAILED),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:12]}",
)
def test_what_follows_from_something_else_is_no_failure_of_the_training(error: BaseException) -> None:
    assert first_cause(error) is None


def test_wrapped_in_another_exception_it_still_is_none() -> None:
    for inner in (dist.DistBackendError("aborted"), ConnectionResetError("Connection reset by peer")):
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = inner
        assert first_cause(wrapped) is None
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = KeyError("n")
    assert first_cause(wrapped) is wrapped


def test_what_a_rank_ran_into_while_it_restored_is_its_own() -> None:
    stand_in = PeerError("rank 0: KeyError('lr')", kind=ErrorKind.PEER_FAILED, rank=0)
    stand_in.__cause__ = KeyError("lr")
    assert first_cause(stand_in) is stand_in.__cause__


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FloatingPointError("bad"), NUMERIC),
        (ValueError("loss is NaN"), NUMERIC),
        (RuntimeError("gradient norm is non-finite"), NUMERIC),
        (ValueError("banana information"), CODE),
        (IndexError("list index out of range"), CODE),
        (FileNotFoundError("shard-0007.tar"), ENVIRONMENT),
        (MemoryError(), ENVIRONMENT),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), ENVIRONMENT),
        (RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed."), ENVIRONMENT),
    ],
    ids=str,
)
def test_causes(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_numbers_addresses_and_spaces_do_not_make_another_failure() -> None:
    one = ValueError("step 12: loss 1.5e-07 of <Model at 0x7f8a12>\n in /tmp/4711/a  (id 1f2e3d4c5b6a)")
    other = ValueError("step 9: loss -3 of <Model at 0x7f8b00> in /tmp/12/a (id 00ff00ff00ff)")
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) == "step #: loss # of <Model at #> in /tmp/#/a (id #)"
    assert fingerprint(KeyError("model.layer.weight")) != fingerprint(KeyError("model.layer.bias"))


def test_a_changed_source_is_another_program(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    found = []
    for text in ("def f(): pass\n", "def f(): pass\n", "def f(): return 1\n"):
        path.write_text(text)
        names: dict[str, Callable[[], object]] = {}
        exec(compile(text, str(path), "exec"), names)
        found.append(program_of(names["f"]))
    assert found[0] == found[1] != found[2]
    assert program_of(eval("lambda: 0")) == ""


def live(place: Path, error: BaseException | None, *, at: int, load: Callable[[], object] = lambda: None) -> None:
    class Loaded:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, _: dict[str, int]) -> None:
            load()

    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)}, loaded=Loaded())
        for _ in run.steps(range(20), total=20):
            if run.step == 5:
                run.save().wait(30)
            if run.step == at and error is not None:
                raise error

    main()


def test_a_life_that_fails_leaves_word_of_it_and_no_other_does(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for error in (ValueError("record 17 is broken"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            live(tmp_path, error, at=8)

    def refuse() -> None:
        raise KeyError("n")

    with pytest.raises(KeyError):
        live(tmp_path, None, at=0, load=refuse)
    live(tmp_path, None, at=0)
    first, second, third, fourth = (read_outcome(store, generation) for generation in range(1, 5))
    assert first is not None
    assert (first.error, first.message, first.cause, first.step) == ("ValueError", "record # is broken", CODE, 8)
    assert (first.restored, first.rank) == (None, 0)
    assert (second, fourth) == (None, None)
    assert third is not None
    assert (third.error, third.step, third.restored is not None and third.restored.step) == ("KeyError", 5, 5)
