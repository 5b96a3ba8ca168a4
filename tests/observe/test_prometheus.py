from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from resilient import events
from resilient.errors import ErrorKind, UsageError
from resilient.observe.measures import Measures
from resilient.observe.names import BUCKETS_S, METRICS
from resilient.observe.prometheus import Exposition, Server, TextFile, file_for, require

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def fetch(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


def free_port() -> int:
    with socket.create_server(("", 0)) as found:
        port: int = found.getsockname()[1]
    return port


@pytest.fixture
def measures() -> Measures:
    measures = Measures()
    measures(events.GenerationStarted(rank=3, url="s3://b/run", generation=2, world_size=4, resumed_step=None))
    measures(events.SaveStarted(rank=3, step=5, reason="interval", nbytes=9, stall_s=0.02))
    measures(events.SaveCommitted(rank=3, step=5, nbytes=9, duration_s=2000.0))
    return measures


def test_a_scrape_has_documented_names_labelled_by_run_and_rank(measures: Measures) -> None:
    port = free_port()
    server = Server(Exposition(measures, run='s3://b/"run"\n', rank=3), port)
    try:
        found = scrape(fetch(port))
        measures(events.StepsTaken(rank=3, step=6, steps=1, turn_s=1.0, data_s=0.0, save_s=0.0))
        later = scrape(fetch(port))
    finally:
        server.close()
    suffixes = ("_bucket", "_sum", "_count")
    known = {metric.name + end for metric in METRICS for end in ("", *suffixes)}
    assert set(found) <= known, "such as *_created"
    common = (("rank", "3"), ("run", 's3://b/"run"\n'))
    assert all(set(common) <= set(labels) for each in found.values() for labels in each)
    assert (found["resilient_step"][common], later["resilient_step"][common]) == (5, 6)
    assert found["resilient_saves_total"][(("outcome", "committed"), *common)] == 1
    buckets = {dict(key)["le"]: value for key, value in found["resilient_save_commit_seconds_bucket"].items()}
    assert list(buckets.values()) == [0.0] * len(BUCKETS_S) + [1.0]  # cumulative: 2000 s is above the last bound
    assert found["resilient_save_commit_seconds_sum"][common] == 2000.0
    with pytest.raises(OSError, match=r"refused|reset"):
        fetch(port)


def break_off(port: int, request: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets


def wait_for_answers() -> None:
    until = time.monotonic() + 20
    while any("process_request_thread" in each.name for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_scrape_that_is_broken_off_says_nothing_and_a_fault_of_ours_does(
    measures: Measures, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    exposition = Exposition(measures, run="u", rank=0)
    server = Server(exposition, port)
    try:
        break_off(port, b"GET /met")
        with measures._lock:  # the answer is made after the client has gone
            break_off(port, b"GET /metrics HTTP/1.0\r\n\r\n")
            time.sleep(0.3)
        assert "resilient_step" in fetch(port)
        wait_for_answers()
        assert capsys.readouterr().err == ""

        def broken() -> None:
            raise ValueError("no numbers")

        monkeypatch.setattr(measures, "read", broken)
        with pytest.raises(OSError, match=r"closed|reset"):
            fetch(port)
        wait_for_answers()
        assert "ValueError: no numbers" in capsys.readouterr().err
    finally:
        server.close()


def test_a_taken_port_is_an_error_of_the_system(measures: Measures) -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        Server(Exposition(measures, run="u", rank=0), taken.getsockname()[1])


def test_a_loader_worker_does_not_keep_the_port_of_a_trainer_that_was_killed(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time
        from resilient.observe.measures import Measures
        from resilient.observe.prometheus import Exposition, Server
        server = Server(Exposition(Measures(), run="u", rank=0), int(sys.argv[1]))
        child = os.fork()
        if child == 0:
            print("ready", flush=True)
            sys.stdin.read()  # until the test ends
            os._exit(0)
        time.sleep(120)
    """
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(program), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        assert trainer.stdout.readline() == "ready\n"
        assert "resilient_hung" in fetch(port)
        trainer.kill()
        os.waitpid(trainer.pid, 0)
        try:
            second = Server(Exposition(Measures(), run="u", rank=0), port)
            second.close()
        finally:
            trainer.stdin.close()


def test_a_client_of_either_protocol_is_answered_where_the_host_has_it(measures: Measures) -> None:
    port = free_port()
    server = Server(Exposition(measures, run="u", rank=0), port)
    try:
        assert "resilient_step" in fetch(port)
        try:
            socket.create_connection(("::1", port), timeout=10).close()
        except OSError:
            pytest.skip("this host has no IPv6")
        assert "resilient_step" in fetch(port, "[::1]")
    finally:
        server.close()


def test_a_file_is_never_seen_in_part_and_is_gone_at_the_end(
    measures: Measures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient.observe.prometheus._WRITE_EVERY_S", 0.001)
    path = tmp_path / "resilient-0.prom"
    failures: list[OSError] = []
    file = TextFile(Exposition(measures, run="u", rank=0), path, failures.append)
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    whole = len(path.read_bytes())
    seen = set()
    for _ in range(300):
        assert {each.name for each in tmp_path.glob("*.prom")} == {path.name}
        text = path.read_text()
        seen.add(len(text))
        scrape(text)
    file.close()
    assert seen == {whole}
    assert not failures
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told_once_and_tried_again(
    measures: Measures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient.observe.prometheus._WRITE_EVERY_S", 0.01)
    path = tmp_path / "later" / "resilient.prom"
    failures: list[OSError] = []
    told = threading.Event()

    def failed(error: OSError) -> None:
        failures.append(error)
        told.set()

    file = TextFile(Exposition(measures, run="u", rank=0), path, failed)
    assert told.wait(20)
    time.sleep(0.1)
    path.parent.mkdir()
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists()
    file.close()
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/a/resilient.prom", "/a/resilient-1.prom"),
        ("/a/r-{rank}.prom", "/a/r-9.prom"),
        ("/a/{local_rank}/r.prom", "/a/1/r.prom"),
    ],
)
def test_each_rank_has_a_file_of_its_own(pattern: str, expected: str) -> None:
    assert file_for(pattern, rank=9, local_rank=1) == Path(expected)


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resilient

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match="prometheus-client") as caught:
        require()
    assert caught.value.kind is ErrorKind.MISSING_EXTRA
    assert caught.value.hint == 'pip install "resilient-torch[prometheus]"'
    for setting in ({"metrics_port": 9400}, {"metrics_file": "/x/y.prom"}):
        with pytest.raises(UsageError, match="prometheus-client"):  # at the decorator, before any training
            resilient.train(tmp_path / "run", **setting)
    resilient.train(tmp_path / "run")  # without these settings nothing needs it
