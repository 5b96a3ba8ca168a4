"""A key-value server of torch as a place: it keeps what a store promises, and says who is missing."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from resilient.clock import SYSTEM_CLOCK
from resilient.elastic.endpoint import open_endpoint
from resilient.elastic.key_value_place import KeyValuePlace, serve
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.store.base import Store
from tests.store.conformance import StoreConformance

SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class TestKeyValuePlace(StoreConformance):
    @pytest.fixture
    def store(self, server: dist.TCPStore) -> Store:
        for key in server.list_keys():
            server.delete_key(key)
        return KeyValuePlace("localhost", server.port, server=None, timeout_s=10, clock=SYSTEM_CLOCK)

    def test_a_large_object_comes_back_as_it_was(self, store: Store) -> None:
        content = random.Random(7).randbytes(4 << 20)
        store.put("large", [content[:-1], content[-1:]])
        assert store.get("large") == content
        with pytest.raises(StoreError, match=r"has 4194305 bytes; .* takes 4194304"):
            store.put("larger", [content, b"x"])
        assert store.get("large") == content, "the connection still stands"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_whoever_has_the_name_serves_and_everybody_else_connects() -> None:
    port = free_port()
    first = open_endpoint(f"localhost:{port}", is_host=False, timeout_s=10, clock=SYSTEM_CLOCK)
    second = open_endpoint(f"c10d://localhost:{port}", is_host=False, timeout_s=10, clock=SYSTEM_CLOCK)
    assert first.create("a/b", b"first")
    assert not second.create("a/b", b"second")
    assert second.get("a/b") == b"first"
    assert list(second.list("a/")) == ["a/b"]
    assert serve("192.0.2.1", port, is_host=False) is None, "an address of another machine"


def test_a_host_that_does_not_serve_is_waited_for_and_named() -> None:
    port = free_port()
    with pytest.raises(StoreError, match=f"nobody serves c10d://192.0.2.1:{port}: waited 1.5 s") as caught:
        open_endpoint(f"192.0.2.1:{port}", is_host=False, timeout_s=1.5, clock=SYSTEM_CLOCK)
    assert "is_host=1" in str(caught.value.hint)
    for wrong in ("localhost:0", "localhost:99999", "c10d://localhost"):
        with pytest.raises(UsageError, match="no port from 1 to 65535") as refused:
            open_endpoint(wrong, is_host=False, timeout_s=1, clock=SYSTEM_CLOCK)
        assert "HOST:PORT" in str(refused.value.hint)


def test_a_server_that_ends_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        store = open_endpoint(f"localhost:{port}", is_host=False, timeout_s=30, clock=SYSTEM_CLOCK)
        store.put("key", [b"value"])
        server.kill()
    with pytest.raises(StoreError, match="is gone") as caught:
        store.get("key")
    assert not caught.value.retryable
    assert caught.value.kind is ErrorKind.UNREACHABLE
