"""What a node does lies on one time axis, in the right places, and reading it takes next to nothing."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.events import Bus, Event, MachineSampled, Notice
from resilient.observe.machine.sampler import MachineSampler
from tests.observe.machine.test_counters import card


class HandClock:
    def __init__(self) -> None:
        self.s = 50.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(1000.0 + self.s, UTC)

    def monotonic(self) -> float:
        return self.s

    def sleep(self, duration_s: float) -> None:
        self.s += duration_s


def machine(root: Path) -> Path:
    (root / "proc").mkdir()
    (root / "proc/stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    card(root, "lo")
    return card(root, "eth0", speed="1000")


def test_samples_lie_where_they_were_taken_and_what_is_missing_is_nan(tmp_path: Path) -> None:
    folder, clock, told = machine(tmp_path), HandClock(), list[Event]()
    bus = Bus()
    bus.subscribe(told.append)
    sampler = MachineSampler(rank=4, host="n1", period_s=0.1, bus=bus, clock=clock, root=str(tmp_path))
    with ExitStack() as closing:
        sampler._open(closing)
        sampler._begin()
        sampler.sample()
        for number, pause_s in enumerate((0.1, 0.1, 0.3, 0.1), 1):
            clock.s += pause_s
            (folder / "statistics/tx_bytes").write_text(f"{number * 1000}\n")
            (tmp_path / "proc/stat").write_text(f"cpu  {number * 3} 0 0 {number * 7} 0 0 0 0 0 0\n")
            sampler.sample()
        sampler.tell()
    (event,) = told
    assert isinstance(event, MachineSampled)
    assert (event.rank, event.host, event.began_s, event.period_s) == (4, "n1", 1050.0, 0.1)
    values = dict(event.values)
    assert set(values) == {"cpu", "sent_Bps", "received_Bps", "loopback_Bps"}
    expected = [math.nan, 10_000, 10_000, math.nan, math.nan, 3333, 10_000]
    assert values["sent_Bps"] == pytest.approx(expected, nan_ok=True)
    assert values["cpu"] == pytest.approx([math.nan, 0.3, 0.3, math.nan, math.nan, 0.3, 0.3], nan_ok=True)
    rates = sampler.rates()
    assert [(rate.name, rate.sent) for rate in rates] == [("eth0", pytest.approx(4000 / 0.6)), ("lo", 0.0)]
    assert rates[0].capable == 1e9 / 8
    assert sampler.rates() == [], "nothing since"


def test_a_counter_that_is_set_back_tells_nothing_for_a_moment(tmp_path: Path) -> None:
    folder, clock = machine(tmp_path), HandClock()
    sampler = MachineSampler(rank=0, host="n1", period_s=0.1, bus=Bus(), clock=clock, root=str(tmp_path))
    with ExitStack() as closing:
        sampler._open(closing)
        sampler._begin()
        for count in (5000, 10, 20):
            (folder / "statistics/tx_bytes").write_text(f"{count}\n")
            sampler.sample()
            clock.s += 0.1
        found = [sampler._values(sample).get("sent_Bps", -1.0) for sample in sampler._samples if sample is not None]
        assert found == [-1.0, -1.0, 100.0]


def test_the_thread_tells_at_its_end_and_takes_next_to_nothing_of_a_core() -> None:
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(told.append)
    sampler = MachineSampler(rank=0, host="here", period_s=0.02, bus=bus, clock=SYSTEM_CLOCK)
    sampler.start()
    began_s = time.monotonic()
    time.sleep(1.0)
    (thread,) = [each for each in threading.enumerate() if each is sampler._thread]
    assert thread.native_id is not None
    cpu_s = time.clock_gettime(~thread.native_id << 3 | 6)  # the kernel's clock of that thread: see clock_getcpuclockid
    took_s = time.monotonic() - began_s
    sampler.close()
    (event,) = told
    assert isinstance(event, MachineSampled), event
    values = dict(event.values)
    assert len(values["cpu"]) <= took_s / 0.02 + 2
    assert sum(not math.isnan(value) for value in values["cpu"]) >= 5, "a loaded machine leaves some out"
    share = cpu_s / len([v for v in values["loopback_Bps"] if not math.isnan(v)]) / 0.1
    print(f"at 10 Hz it takes {share:.4%} of a core")
    assert share < 0.01, "0.3 % where nothing else runs: benchmarks/observing.py"


def test_a_machine_without_files_is_measured_no_further_and_nothing_fails(tmp_path: Path) -> None:
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(told.append)
    sampler = MachineSampler(rank=0, host="here", period_s=0.01, bus=bus, clock=SYSTEM_CLOCK, root=str(tmp_path))
    sampler.start()
    time.sleep(0.1)
    sampler.close()
    assert told == []
    assert not sampler._thread.is_alive()


def test_an_error_in_the_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(told.append)
    machine(tmp_path)
    sampler = MachineSampler(rank=0, host="here", period_s=0.01, bus=bus, clock=SYSTEM_CLOCK, root=str(tmp_path))

    def broken() -> None:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(sampler, "sample", broken)
    sampler.start()
    sampler._thread.join(5)
    (event,) = told
    assert isinstance(event, Notice)
    assert "not measured any more: RuntimeError: driver gone" in event.message
