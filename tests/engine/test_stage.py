"""Staging: what lies in the slot is the state of the boundary, or the save fails and says of which tensor."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resilient.clock import SYSTEM_CLOCK
from resilient.engine.copying import CopyJob, Move
from resilient.engine.device_copies import DeviceCopies
from resilient.engine.stage import Stager
from resilient.errors import ErrorKind, StoreError
from resilient.format.dtypes import ITEMSIZE
from resilient.state.capture import capture
from resilient.state.capturer import Capturer
from resilient.state.rng import Rng
from resilient.state.tensors import dtype_of
from resilient.writer.slot import Slot
from tests.engine.staging import Bytes, Held, Staged, live, lying_in, placement_of


def any_tensor(draw: random.Random) -> torch.Tensor:
    dtype = dtype_of(draw.choice(sorted(ITEMSIZE)))
    shape = [draw.choice([0, 1, 2, 3, 7, 40]) for _ in range(draw.randrange(4))]
    size = ITEMSIZE[str(dtype).removeprefix("torch.")]
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    kind = draw.randrange(4)
    if kind == 1 and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == 2 and tensor.dim() > 0:
        return tensor[::2]
    if kind == 3 and tensor.dim() > 0:
        return tensor[..., :1].expand(*shape)
    return tensor


@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_tensor_lies_in_the_slot_bit_by_bit(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    items = {"tree": {str(n): any_tensor(draw) for n in range(30)}, "rng": Rng()}
    staged = Staged(held=draw.random() < 0.5, chunk_nbytes=draw.choice([64, 4096, 1 << 20]))
    captured = capture(items, rank=0, world_size=1)
    numbers = range(len(captured.tensors))
    staging = staged.stage(captured, {number for number in numbers if draw.random() < 0.5})
    assert staged.ended(staging) is None
    assert staged.bytes() == live(captured)
    stamp = staged.slot.stamp
    assert stamp == staging.done.result(0)
    assert (stamp.whole, stamp.generation, stamp.step) == (True, 3, 1)
    staged.close()


@pytest.mark.field_report("BR-041")
def test_several_states_in_one_slot_are_each_what_was_there_then() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Conv2d(8, 8, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    capturer = Capturer({"model": model, "rng": Rng()}, rank=0, world_size=1)
    staged = Staged()
    seen: list[Bytes] = []
    leaves = capturer.capture().tensors
    for _ in range(10):
        for parameter in model.parameters():
            parameter.data = torch.rand_like(parameter)  # other memory, the same layout
        captured = capturer.capture()
        assert captured.tensors is leaves
        assert staged.ended(staged.stage(captured)) is None
        seen.append(staged.bytes())
        assert seen[-1] == live(captured)
    assert all(one != other for one, other in itertools.pairwise(seen))
    staged.close()


def test_what_does_not_overlap_is_copied_before_training_goes_on() -> None:
    tensors = {"large": torch.zeros(3 << 20), "strided": torch.zeros(60, 60).t(), "small": torch.zeros(5)}
    staged = Staged(held=True)
    staging = staged.stage(capture({"t": tensors}, rank=0, world_size=1), set())
    for tensor in tensors.values():
        tensor.fill_(1)
    assert staged.ended(staging) is None
    assert not any(any(data) for data in staged.bytes().values())
    staged.close()


def test_a_fence_does_the_work_of_threads_that_do_not_run() -> None:
    tensors = {str(n): torch.zeros(40_000) for n in range(30)}
    staged = Staged(held=True)
    staging = staged.stage(capture({"t": tensors}, rank=0, world_size=1))
    assert staging.fence() > 0
    for tensor in tensors.values():
        tensor.fill_(1)
    assert staged.ended(staging) is None
    assert not any(any(data) for data in staged.bytes().values())
    staged.close()


def test_a_fence_waits_for_a_copy_that_another_thread_has_begun() -> None:
    began, may_end = threading.Event(), threading.Event()

    def run(copy: object) -> None:
        began.set()
        assert may_end.wait(30)

    job = CopyJob([object()], run)  # type: ignore[list-item]
    thread = threading.Thread(target=job.work)
    thread.start()
    assert began.wait(30)

    def finish() -> None:
        job.work()
        job.wait(SYSTEM_CLOCK)

    fence = threading.Thread(target=finish)
    fence.start()
    fence.join(0.05)
    assert fence.is_alive()
    may_end.set()
    fence.join(30)
    thread.join(30)
    assert not fence.is_alive()


class Interrupting:
    """Raises KeyboardInterrupt in this thread before the N-th instruction of a job's methods, once."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in (CopyJob.work.__code__, CopyJob.wait.__code__, CopyJob._copy.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_a_thread_that_is_interrupted_anywhere_leaves_no_copy_undone_and_none_that_is_made_late() -> None:
    number, left = 0, 0
    while left <= 0:
        number += 1
        made: list[object] = []
        job = CopyJob([1, 2, 3], made.append)  # type: ignore[list-item]
        interrupting, before = Interrupting(number), sys.gettrace()
        sys.settrace(interrupting)
        try:
            job.wait(SYSTEM_CLOCK)
        except KeyboardInterrupt:
            assert interrupting.left == 0
        finally:
            sys.settrace(before)
        left = interrupting.left
        job.wait(SYSTEM_CLOCK)
        assert (set(made), job.error) == ({1, 2, 3}, None), number
        made.clear()
        job.work()
        assert not made, number
    assert number > 100


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the training thread in the middle of the next copy that it makes, as a signal's handler does."""
    run, may_raise = Move.run, [True]

    def interrupted(copy: Move, target: Any) -> None:
        if threading.current_thread() is threading.main_thread() and may_raise and may_raise.pop():
            raise SystemExit(143)
        run(copy, target)

    monkeypatch.setattr(Move, "run", interrupted)


def test_a_signal_while_the_training_thread_helps_is_not_lost_and_nor_is_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {str(n): torch.full((40_000,), float(n)) for n in range(5)}
    staged = Staged(held=True)
    staging = staged.stage(captured := capture({"t": tensors}, rank=0, world_size=1))
    interrupt_once(monkeypatch)
    with pytest.raises(SystemExit):
        staging.fence()
    assert staged.ended(staging) is None
    assert staged.bytes() == live(captured)
    staged.close()


def test_a_signal_in_a_copy_that_training_waits_for_is_raised_when_nothing_is_copied_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[bool] = []
    began, copying = threading.Event(), threading.Event()
    run = Move.run

    def interrupted(copy: Move, target: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert began.wait(30)
            raise KeyboardInterrupt
        copying.set()
        began.set()
        time.sleep(0.1)
        run(copy, target)
        copying.clear()

    monkeypatch.setattr(Move, "run", interrupted)
    monkeypatch.setattr(DeviceCopies, "wait", lambda _: waited.append(copying.is_set()))
    staged = Staged()
    with pytest.raises(KeyboardInterrupt):
        staged.stage(capture({"t": {"x": torch.zeros(8 << 20)}}, rank=0, world_size=1), set())
    assert waited == [False], "the devices may be copying, too"
    assert not copying.is_set()
    assert not staged.slot.stamp.whole
    monkeypatch.setattr(Move, "run", run)
    assert staged.ended(staged.stage(capture({"t": {"x": torch.zeros(9)}}, rank=0, world_size=1), set())) is None
    staged.close()


def test_what_ends_a_copying_thread_fails_the_save_and_does_not_end_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = Staged(held=True)
    staging = staged.stage(capture({"t": {"x": torch.zeros(40_000)}}, rank=0, world_size=1))
    interrupt_once(monkeypatch)
    with pytest.raises(SystemExit):
        staged.ended(staging)
    with pytest.raises(StoreError, match="interrupted by SystemExit"):
        staging.done.result(0)
    staging.settle()
    staged.close()


def in_place(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] += 1


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [in_place, through_data, through_numpy, freed])
@pytest.mark.parametrize("size", [2000, 5_000_000])
def test_a_torn_copy_fails_the_save_and_names_the_tensor(change: Callable[[torch.Tensor], None], size: int) -> None:
    tensors = {str(n): torch.zeros(size if n == 3 else 1500) for n in range(6)}
    staged = Staged(held=True)
    staging = staged.stage(capture({"t": tensors}, rank=0, world_size=1))
    change(tensors["3"])
    error = staged.ended(staging)
    assert isinstance(error, StoreError)
    assert error.kind is ErrorKind.SAVE_FAILED
    assert str(error).startswith("t: 3 changed while step 1 was copied")
    assert staging.torn == {("t", "3")}
    assert not staged.slot.stamp.whole
    staging = staged.stage(capture({"t": {"x": torch.ones(1)}}, rank=0, world_size=1))
    assert staged.ended(staging) is None, "the next save is not affected"
    staged.close()


def test_what_changes_beside_the_samples_is_seen_while_there_is_time_to_compare() -> None:
    tensor = torch.zeros(1 << 20)

    class Changing(Held):
        def let_go(self) -> None:
            tensor.numpy()[100_000] = 1  # neither counted as a version, nor at a place that is kept
            super().let_go()

    staged = Staged()
    staged.stager.close()
    staged.stager = Stager(threads=1, pool=Changing())
    staging = staged.stage(capture({"t": {"x": tensor}}, rank=0, world_size=1))
    job = staging._later
    job.work()  # copied, and then changed before the comparison
    assert isinstance(staged.stager._pool, Changing)
    staged.stager._pool.let_go()
    assert isinstance(staging.done.exception(30), StoreError)
    assert staging.torn == {("t", "x")}
    staged.slot.close()


def test_memory_that_was_given_back_is_an_error_and_not_a_crash() -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    staged = Staged()
    with pytest.raises(StoreError, match="t: x has no memory any more"):
        staged.stage(capture({"t": {"x": tensor}}, rank=0, world_size=1))
    staged.close()


def test_dropped_and_swapped_memory_lives_until_it_is_copied_and_no_longer() -> None:
    owners = [np.full((64, 64), value, dtype=np.float32) for value in (1, 2)]
    gone = [weakref.ref(owner) for owner in owners]
    model = nn.ParameterDict({"a": torch.from_numpy(owners[0]), "b": torch.from_numpy(owners[1]).t()})
    del owners
    capturer = Capturer({"model": model}, rank=0, world_size=1)
    staged = Staged(held=True)
    staged.ended(staged.stage(capturer.capture()))
    staging = staged.stage(capturer.capture())
    staged._captured = capture({"model": model}, rank=0, world_size=1)
    model["a"].data = torch.zeros(64, 64)
    staged._captured.locals[1].data = torch.zeros(64, 64)
    model["b"].data = torch.zeros(64, 64)
    gc.collect()
    assert all(owner() is not None for owner in gone)
    assert staged.ended(staging) is None
    assert set(np.frombuffer(staged.bytes()["model", "a"], dtype=np.float32)) == {1}
    assert set(np.frombuffer(staged.bytes()["model", "b"], dtype=np.float32)) == {2}
    del staged._captured
    gc.collect()
    assert all(owner() is None for owner in gone)
    staged.close()


def test_the_state_before_is_never_mixed_with_the_next_one() -> None:
    tensors = {str(n): torch.zeros(100_000) for n in range(4)}
    staged = Staged(held=True)
    staging = staged.stage(capture({"t": tensors}, rank=0, world_size=1))
    staging.fence()
    waiting = threading.Thread(target=staging.settle)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "its samples are not compared yet"
    assert staged.ended(staging) is None
    waiting.join(30)
    assert not waiting.is_alive()
    staged.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_many_small_tensors_take_one_pass(overlaps: bool, count: Callable[[int, int], int]) -> None:
    number = count(20_000, 100_000)
    items = {"t": {str(n): torch.full((64,), float(n)) for n in range(number)}}
    capturer = Capturer(items, rank=0, world_size=1)
    captured = capturer.capture()
    placement = placement_of(captured)
    slot = Slot.create("test")
    with Stager(threads=1) as stager:
        chosen = frozenset(range(number)) if overlaps else frozenset[int]()
        durations_s = []
        for step in range(4):
            captured = capturer.capture()
            before_s = time.process_time()
            staging = stager.stage(captured, placement, slot, generation=1, step=step, overlapped=chosen)
            staging.done.result(30)
            durations_s.append(time.process_time() - before_s)
        assert min(durations_s) / number < 5e-6  # a view and a copy of torch for each take 10 to 20
    assert lying_in(slot, captured, placement) == live(captured)
    slot.close()


def test_training_is_held_up_for_microseconds_per_tensor() -> None:
    number = 1000
    items = {"t": {str(n): torch.zeros(40_000) for n in range(number)}}
    capturer = Capturer(items, rank=0, world_size=1)
    placement = placement_of(capturer.capture())
    slot = Slot.create("test")
    with Stager(threads=1) as stager:
        durations_s = []
        for step in range(5):
            captured = capturer.capture()
            before_s = time.thread_time()
            staging = stager.stage(
                captured, placement, slot, generation=1, step=step, overlapped=frozenset(range(number))
            )
            durations_s.append(time.thread_time() - before_s)
            staging.done.result(30)
        assert min(durations_s) / number < 5e-6  # copying them takes 15 or more
    assert math.isclose(sum(map(len, lying_in(slot, captured, placement).values())), 160_000 * number)
    slot.close()


def test_what_was_prepared_is_not_worked_out_again() -> None:
    capturer = Capturer({"t": {"x": torch.ones(2000), "y": torch.ones(3, 3).t()}, "rng": Rng()}, rank=0, world_size=1)
    captured = capturer.capture()
    placement = placement_of(captured)
    slot = Slot.create("test")
    with Stager() as stager:
        stager.prepare(captured, placement, [0])
        plan = stager._plan
        assert plan is not None
        kept = plan._kept
        for step in range(3):
            captured = capturer.capture()
            staging = stager.stage(captured, placement, slot, generation=1, step=step, overlapped={0})
            staging.done.result(30)
            assert stager._plan is plan
            assert plan._kept is kept
            assert lying_in(slot, captured, placement) == live(captured)
    slot.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_first_save_starts_no_thread_and_maps_no_memory(overlaps: bool) -> None:
    # Both wait for the thread that touches the slots: it keeps others from changing what is mapped.
    captured = capture({"t": {str(n): torch.full((1 << 20,), float(n)) for n in range(4)}}, rank=0, world_size=1)
    placement = placement_of(captured)
    slot = Slot.create("test")
    slot.grow(placement.nbytes)
    chosen = frozenset(range(4)) if overlaps else frozenset[int]()
    with Stager(threads=3) as stager:
        stager.prepare(captured, placement, chosen)
        before = set(threading.enumerate()), stager._samples._map
        staging = stager.stage(captured, placement, slot, generation=1, step=1, overlapped=chosen)
        staging.done.result(30)
        assert (set(threading.enumerate()), stager._samples._map) == before
        assert len([each for each in before[0] if each.name.startswith("resilient-copy")]) >= 3
    assert lying_in(slot, captured, placement) == live(captured)
    slot.close()
