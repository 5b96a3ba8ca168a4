"""Whoever asks a key-value store that is silent gives up in time, and goes on once it answers again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from resilient.detect import proc
from resilient.engine.key_values import TorchValues
from resilient.errors import ErrorKind, PeerError

SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def a_server() -> Iterator[tuple[int, int]]:
    """Yield the port and the process of a TCPStore's server."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline()), server.pid
        finally:
            server.send_signal(signal.SIGCONT)
            server.kill()


def test_a_stopped_server_holds_nobody_for_ever() -> None:
    with a_server() as (port, pid):
        client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30), wait_for_workers=False)
        values = TorchValues(client, timeout_s=1.0)
        values.set("key", b"value")
        assert values.get("key") == b"value"
        os.kill(pid, signal.SIGSTOP)
        while proc.state(pid) != "T":  # until then it may answer
            time.sleep(0.01)
        started_s = time.monotonic()
        for _ in range(20):  # only the first one waits
            with pytest.raises(PeerError, match="has not answered within 1 s") as caught:
                values.check(["key"])
            assert caught.value.kind is ErrorKind.PEER_TIMEOUT
        assert time.monotonic() - started_s < 10
        os.kill(pid, signal.SIGCONT)
        deadline_s = time.monotonic() + 30
        while True:
            try:
                assert values.check(["key"])
                break
            except PeerError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)


def test_an_error_of_the_store_is_ours_and_harms_no_later_call() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    values = TorchValues(store)
    with pytest.raises(PeerError) as caught:
        values.get("nothing")
    assert caught.value.kind is ErrorKind.PEER_FAILED
    values.set("key", b"value")
    assert values.get("key") == b"value"
