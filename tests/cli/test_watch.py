"""``resilient watch``: a run that goes on, seen from its store alone."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from resilient.catalog import process
from resilient.catalog.beat import Beating
from resilient.catalog.generations import claim_generation
from resilient.catalog.launch import Heartbeat
from resilient.cli import watch as command
from resilient.clock import Clock
from resilient.errors import ErrorKind, StoreError
from resilient.format import layout
from resilient.report.live import Live
from resilient.report.model import Ledger
from resilient.store.base import Store
from resilient.store.local import LocalStore
from tests.catalog.runs import HandClock, new_generation
from tests.cli.calling import call, called
from tests.report import ledgers


class Account:
    """What is read from the store, as far as a test says; counts how often."""

    def __init__(self) -> None:
        self.ledger = ledgers.running()
        self.away = False
        self.takes_s = 0.0
        self.reads = 0

    def __call__(self, store: Store, *, clock: Clock) -> Ledger:
        self.reads += 1
        clock.sleep(self.takes_s)
        if self.away:
            raise StoreError("no answer from the store", kind=ErrorKind.UNREACHABLE, retryable=True)
        return self.ledger


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    made = Account()
    monkeypatch.setattr(command, "read_ledger", made)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    new_generation(LocalStore(tmp_path / "run"))
    return tmp_path / "run"


def watcher(run: Path, clock: HandClock) -> command.Watcher:
    return command.Watcher(LocalStore(run), clock, every_s=2.0, total=5000)


def test_once_it_says_all_and_ends(run: Path, account: Account) -> None:
    text = call("watch", run, "--once", "--total", 5000).stdout
    for part in ("step          step 2,360 of 5,000", "saved         saved step 2,000", "done          in "):
        assert part in text
    told = called("watch", run, "--once")
    assert (told["step"], told["saved_step"], told["save_in_flight"]) == (2360, 2000, 2350)


def test_what_is_wrong_at_once_is_an_error(run: Path, account: Account, tmp_path: Path) -> None:
    account.away = True
    assert called("watch", run, "--once", code=13)["error"]["kind"] == "unreachable"
    called("watch", tmp_path / "absent", code=10)
    assert called("watch", run, "--every", "often", code=2)["error"]["kind"] == "invalid-argument"


def test_while_the_store_is_away_the_last_view_stays_and_says_so(run: Path, account: Account) -> None:
    clock = HandClock()
    watched = watcher(run, clock)
    assert watched.look().trouble == ""
    account.away = True
    clock.sleep(40)
    live = watched.look()
    assert (live.trouble, live.age_s, live.ledger.step) == ("no answer from the store", 40.0, 2360)
    account.away = False
    clock.sleep(2)
    assert watched.look().trouble == ""


def test_reading_takes_a_tenth_of_the_time_at_most(run: Path, account: Account) -> None:
    clock = HandClock()
    account.takes_s = 3.0
    watched = watcher(run, clock)
    for _ in range(100):
        watched.look()
        clock.sleep(2)
    assert (account.reads - 1) * account.takes_s <= 0.1 * clock.elapsed_s  # the first one is paid for afterwards


def test_the_speed_is_that_of_the_last_minute(run: Path, account: Account) -> None:
    clock = HandClock()
    watched = watcher(run, clock)
    first = watched.look().steps_per_s
    assert first == pytest.approx(2360 / 1188), "of the generation, as long as nothing else is known"
    for step in range(2360, 2760, 10):
        account.ledger = replace(account.ledger, step=step)
        live = watched.look()
        clock.sleep(2)
    assert live.steps_per_s == pytest.approx(5)


def test_a_launch_of_this_machine_is_looked_up_and_one_of_another_has_to_move(
    tmp_path: Path, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = LocalStore(tmp_path / "run"), HandClock()
    new_generation(store)
    launch = "c" * 32
    claim_generation(store, world_size=2, launch=launch, heartbeat=True)
    with Heartbeat(store, launch, interval_s=1000.0):
        assert watcher(tmp_path / "run", clock).look().alive is True
    monkeypatch.setattr(command, "lives", lambda *_: None)  # as for another machine
    beating = Beating(store, layout.heartbeat(launch), interval_s=5.0, clock=clock, remove=False)
    beating.beat()
    watched = watcher(tmp_path / "run", clock)
    seen = []
    for beats in (False, True, False, False, False, False, True):
        if beats:
            beating.beat()
        seen.append(watched.look().alive)
        clock.sleep(6)
    assert seen == [None, True, True, True, False, False, True]
    assert process.host()  # the sign bears the name of this one, which nobody has looked at


def test_a_launch_that_has_ended_gives_no_sign(tmp_path: Path, account: Account) -> None:
    store = LocalStore(tmp_path / "run")
    new_generation(store)
    claim_generation(store, world_size=2, launch="c" * 32, heartbeat=True)
    with Heartbeat(store, "c" * 32, interval_s=1000.0):
        pass
    assert watcher(tmp_path / "run", HandClock()).look().alive is False


def test_only_a_run_that_should_be_alive_is_shown_in_red() -> None:
    live = Live(ledger=ledgers.calm(), now_s=2e9, alive=False, steps_per_s=None, total=None)
    assert "1;31m" not in in_color(live)
    assert "1;31m" in in_color(replace(live, ledger=ledgers.running()))


def in_color(live: Live) -> str:
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system="standard", width=100).print(command._view(live))
    return shown.getvalue()


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from resilient.cli import watch
from resilient.cli.main import main
from tests.report import ledgers
watch.read_ledger = lambda store, *, clock: ledgers.running()
main(sys.argv[1:], prog_name="resilient")
"""


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_without_a_terminal_there_is_a_line_for_each_look_until_ctrl_c(run: Path) -> None:
    watching = started("watch", run, "--every", "100ms", "--json")
    assert watching.stdout is not None
    lines = [json.loads(watching.stdout.readline()) for _ in range(3)]
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=60)
    assert watching.returncode == 130, said
    assert said == "interrupted\n"
    assert [one["step"] for one in lines] == [2360] * 3


def test_on_a_terminal_the_view_stays_in_place_until_ctrl_c(run: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", PROGRAM, "watch", str(run), "--every", "100ms"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    watching = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    ended = threading.Timer(60, watching.kill)  # then reading ends with an error, and the test with it
    ended.start()
    while seen.count(b"step 2,360, 1.99 steps/s") < 3:
        seen += os.read(ours, 65536)
    watching.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody is at its other end
            break
        if not more:
            break
        seen += more
    assert watching.wait(timeout=60) == 130
    ended.cancel()
    os.close(ours)
    assert b"\x1b[1A" in seen, "it goes back up"
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1, "the cursor is there again"


def test_its_help_teaches() -> None:
    text = call("watch", "--help").stdout
    for word in ("Ctrl-C", "--total", "--once", "Example:"):
        assert word in text
