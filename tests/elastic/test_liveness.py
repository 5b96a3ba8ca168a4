"""Whether another agent lives is known within seconds, and nobody is taken for somebody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from resilient.elastic.liveness import Gone, Listener, StrangerError, Watches, connect, try_all
from tests.elastic.test_rounds import agent

TIMEOUT_S = 0.6


def until(holds: Callable[[], object], timeout_s: float = 20) -> float:
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def watches() -> Iterator[Watches]:
    made = Watches("me", timeout_s=TIMEOUT_S, changed=lambda: None)
    yield made
    made.close()


def at(nonce: str, port: int, *addresses: str) -> Any:
    return msgspec.structs.replace(agent(nonce), addresses=addresses or ("127.0.0.1",), port=port)


def test_a_listener_without_descriptors_rests_between_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    class Full:
        def accept(self) -> None:
            tries.append(1)
            raise OSError(24, "Too many open files")

    with Listener("1", lambda: None) as listener:
        real = listener._socket
        monkeypatch.setattr(listener, "_socket", Full())
        try_all("2", [at("1", listener.port)], timeout_s=0.2)  # ends the accept() that waits
        time.sleep(0.5)
        assert 1 <= len(tries) <= 8
        monkeypatch.setattr(listener, "_socket", real)
        assert try_all("2", [at("1", listener.port)], timeout_s=5) == {"1": 0}


def test_an_agent_that_answers_is_reached_and_one_that_ends_is_gone_for_certain(watches: Watches) -> None:
    listener = Listener("1", lambda: None)
    watches.watch([at("1", listener.port)])
    until(lambda: watches.reached() == {"1": 0})
    time.sleep(2 * TIMEOUT_S)
    assert not watches.gone(), "it answers"
    listener.close()
    took_s = until(watches.gone)
    assert watches.gone()["1"].certain
    assert took_s < 5, "a connection that is closed shows at once, not by a ping"


def test_one_that_falls_silent_is_gone_within_two_timeouts_but_not_for_certain(watches: Watches) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    heard = []

    def answer_once() -> None:
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b'{"here": "1"}\n')
        heard.append(connection)  # and nothing more: as a host that stands still

    threading.Thread(target=answer_once, daemon=True).start()
    watches.watch([at("1", server.getsockname()[1])])
    until(watches.reached)
    until(watches.gone)
    assert not watches.gone()["1"].certain
    server.close()


def test_one_more_connection_is_tried_before_anybody_is_gone(watches: Watches) -> None:
    listener = Listener("1", lambda: None)
    watches.watch([at("1", listener.port)])
    until(watches.reached)
    for connection in list(listener._open):
        connection.shutdown(socket.SHUT_RDWR)  # cut by what stands between
    time.sleep(3 * TIMEOUT_S)
    assert not watches.gone()
    assert watches.reached()
    listener.close()


def test_another_process_at_the_same_port_is_not_taken_for_the_agent(watches: Watches) -> None:
    with Listener("another", lambda: None) as listener:
        with pytest.raises(StrangerError, match="another process answers there"):
            connect("me", at("1", listener.port), "127.0.0.1", timeout_s=5)
        watches.watch([at("1", listener.port)])
        until(watches.gone)


def test_what_is_no_word_of_an_agent_harms_nobody() -> None:
    with Listener("1", lambda: None) as listener:
        for rubbish in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"to": 3}\n', b"\xff" * 100_000):
            with socket.create_connection(("127.0.0.1", listener.port)) as connection:
                connection.sendall(rubbish)
        assert try_all("me", [at("1", listener.port)], timeout_s=5) == {"1": 0}


def test_a_name_that_nobody_knows_falls_back_to_the_address_and_that_is_told() -> None:
    with Listener("1", lambda: None) as listener:
        found = try_all("me", [at("1", listener.port, "256.256.256.256", "127.0.0.1")], timeout_s=5)
    assert found == {"1": 1}


def test_who_is_dead_for_certain_is_told_from_who_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        silent = try_all("me", [at("1", port)], timeout_s=0.3)["1"]
    dead = try_all("me", [at("1", port, "256.256.256.256", "127.0.0.1")], timeout_s=0.3)["1"]
    assert isinstance(silent, Gone)
    assert not silent.certain
    assert isinstance(dead, Gone)
    assert dead.certain
    assert try_all("me", [], timeout_s=1) == {}


def test_who_is_poked_looks(watches: Watches) -> None:
    poked = threading.Event()
    with Listener("1", poked.set) as listener:
        watches.watch([at("1", listener.port)])
        until(watches.reached)
        time.sleep(0.1)
        watches.poke()
        assert poked.wait(20)


def test_who_is_watched_no_more_is_forgotten(watches: Watches) -> None:
    with Listener("1", lambda: None) as listener:
        watches.watch([at("1", listener.port)])
        until(watches.reached)
        watches.watch([])
        assert not watches.reached()
    assert not watches.gone()
