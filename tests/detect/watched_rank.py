"""A rank without torch that is watched: it trains by sleeping, and does then what it is told.

Usage: watched_rank.py FOLDER INTERVAL_S FLOOR_S HOW. HOW:
    wait: go on until it is killed.
    hold: hold the interpreter's lock for ever.
    hold-a-while: hold it for four intervals within each step, which is no hang; then end.
    restart: hang with the lock held, and be ended for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from resilient.detect.page import Owner, Page
from resilient.detect.stacks import StackFile
from resilient.detect.words import PAGE, STACKS, Task
from resilient.run.watch_process import WatchProcess

TURNS, TURN_S = 20, 0.01


def main() -> None:
    folder, interval_s, floor_s, how = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    stacks = StackFile(folder / f"{STACKS}0")
    owner = Owner(pid=os.getpid(), rank=0, signal=stacks.signal, thread=threading.get_ident())
    page = Page(folder / f"{PAGE}0", owner)
    task = Task(
        folder=str(folder),
        learned=str(folder.parent / "learned"),
        rank=0,
        world_size=1,
        generation=1,
        nonce="0" * 16,
        interval_s=interval_s,
        floor_s=floor_s,
        unlearned_s=floor_s,
        restart=how == "restart",
    )
    watcher = WatchProcess(task)
    heard = watcher.hear(30)
    assert heard, "no watcher"
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s / 4):
            page.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    step = page.section("step")
    for turn in range(TURNS):
        page.turn_to(step, turn)
        time.sleep(TURN_S)
    page.turn_to(step, TURNS)
    hold = ctypes.PyDLL(None).usleep  # called with the lock held
    print("hanging", watcher.pid, time.monotonic(), flush=True)
    if how == "hold-a-while":
        for turn in range(3):
            hold(round(4e6 * interval_s))
            page.turn_to(step, TURNS + turn)
            time.sleep(interval_s)
        print(len(watcher.hear(0) or []), flush=True)
        ended.set()
        beating.join()
        page.close()
        sys.exit(watcher.close(10))
    while how in ("hold", "restart"):
        hold(1_000_000)
    time.sleep(600)


if __name__ == "__main__":
    main()
