"""Stacks are had from a process that holds the interpreter's lock, and they tell who waits for other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.detect import proc
from resilient.detect.stacks import Frame, frames_of, section_of, signature, take, waits
from resilient.policy.progress import MAY_WAIT, RUNNING, WAITS

PROGRAM = textwrap.dedent(
    """
    import ctypes, multiprocessing, sys, threading, time
    from pathlib import Path
    from resilient.detect.stacks import StackFile

    def sleeping_in_a_worker():
        time.sleep(600)

    def holding_the_lock():
        sleep = ctypes.PyDLL(None).sleep
        while True:
            sleep(600)

    if __name__ == "__main__":
        stacks = StackFile(Path(sys.argv[1]))
        worker = multiprocessing.get_context("fork").Process(target=sleeping_in_a_worker, daemon=True)
        worker.start()
        other = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
        import subprocess
        child = subprocess.Popen(other, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.3)
        print(stacks.signal, threading.get_ident(), worker.pid, child.pid, flush=True)
        holding_the_lock()
    """
)


def test_a_process_that_holds_the_lock_tells_where_and_so_do_its_workers_and_nobody_dies_of_it(tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "stacks"
    program.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, str(program), str(file)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        number, thread, worker, child = map(int, process.stdout.readline().split())
        time.sleep(0.3)
        frames = frames_of(take(process.pid, number, file, SYSTEM_CLOCK), thread)
        assert [frame.function for frame in frames] == ["holding_the_lock", "<module>"]
        assert frames[0].file == str(program)
        of_worker = frames_of(take(worker, number, file, SYSTEM_CLOCK), 0)
        assert of_worker[0].function == "sleeping_in_a_worker"
        assert {worker, child} <= set(proc.children(process.pid))
        assert take(child, number, file, SYSTEM_CLOCK) == "", "it has no handler: the signal would end it"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert proc.is_stopped(proc.state(process.pid))
        assert take(process.pid, number, file, SYSTEM_CLOCK) == ""
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)
        assert process.poll() is None
        assert proc.state(worker) == proc.state(child) == "S"
    finally:
        subprocess.run(["kill", "-9", *map(str, proc.children(process.pid))], check=False)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


SITE = "/venv/lib/python3.11/site-packages/torch/"
OURS = str(Path(proc.__file__).parents[1])
STANDARD = os.path.dirname(subprocess.__file__)  # noqa: PTH120 -- as faulthandler writes it


def stack(*calls: str) -> list[Frame]:
    """Return frames, newest first, of ``file:function``."""
    return [Frame(file=call.partition(":")[0], function=call.partition(":")[2], line=1) for call in calls]


LOOP = "/home/me/train.py:main"
STACKS = {
    "a collective": ([f"{SITE}distributed/distributed_c10d.py:all_reduce", LOOP], WAITS, "exchange"),
    "the gradients' exchange may be in it": ([f"{SITE}autograd/graph.py:_engine_run_backward", LOOP], MAY_WAIT, "step"),
    "a gather of shards": (
        [f"{SITE}distributed/fsdp/_fully_shard/_fsdp_param_group.py:unshard", LOOP],
        WAITS,
        "exchange",
    ),
    "the word of another rank": (
        [f"{STANDARD}/threading.py:wait", f"{OURS}/engine/key_values.py:_call", f"{OURS}/engine/peers.py:fetch", LOOP],
        WAITS,
        "exchange",
    ),
    "sleep in the program": ([LOOP], RUNNING, "step"),
    "a lock in the program": (
        [f"{STANDARD}/threading.py:wait", LOOP, f"{SITE}distributed/run.py:main"],
        RUNNING,
        "step",
    ),
    "a model within a module": (
        [f"{SITE}nn/modules/linear.py:forward", "/home/me/model.py:forward", LOOP],
        RUNNING,
        "step",
    ),
    "arithmetic on sharded tensors": ([f"{SITE}distributed/tensor/_dispatch.py:dispatch", LOOP], RUNNING, "step"),
    "the copy of a state": ([f"{STANDARD}/threading.py:wait", f"{OURS}/engine/stage.py:fence", LOOP], RUNNING, "save"),
    "nothing": ([], RUNNING, "step"),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_tells_whether_a_rank_waits_for_others_and_in_what(name: str) -> None:
    calls, expected, section = STACKS[name]
    frames = stack(*calls)
    assert waits(frames) == expected
    assert section_of(frames, "step", ["step"]) == section
    assert section_of(frames, "evaluation", ["step"]) == "evaluation", "what the program has named stays"


def test_the_newest_calls_are_what_stacks_are_compared_by() -> None:
    assert signature(stack("a:f", "b:g", "c:h", "d:i")) == "f < g < h"


def test_the_thread_that_trains_is_found_among_all() -> None:
    text = textwrap.dedent(
        """\
        Thread 0x00007f10 (most recent call first):
          File "/a.py", line 3 in beat

        Current thread 0x00007f20 (most recent call first):
          File "/b.py", line 4 in work
          File "/b.py", line 5 in main
        """
    )
    assert [frame.function for frame in frames_of(text, 0x7F10)] == ["beat"]
    assert [frame.function for frame in frames_of(text, 0x7F20)] == ["work", "main"]
    assert [frame.function for frame in frames_of(text, 0)] == ["work", "main"], "the main thread is the last one"
    assert frames_of("", 0) == []
