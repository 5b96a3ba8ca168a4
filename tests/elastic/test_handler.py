"""What the backend refuses at once, and that torch finds it without importing anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousParameters, RendezvousTimeoutError

from resilient.elastic import directories, endpoint, handler
from resilient.elastic.conf import Conf, read_conf
from resilient.elastic.ledger import Ledger
from resilient.elastic.node import Asked
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.store.base import Capabilities
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store


def parameters(endpoint: str, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("resilient", endpoint, "job", 1, 1, **conf)


def test_torch_finds_the_backend_and_imports_nothing_heavy_for_it() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="resilient")
    assert found.value == "resilient.elastic.backend:get_handler"
    program = "import sys, resilient.elastic.backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_without_a_place_it_says_which_one_to_give() -> None:
    with pytest.raises(UsageError, match="a place that all nodes share") as caught:
        handler.create(parameters(""))
    assert "--rdzv-endpoint=s3://bucket/run" in str(caught.value.hint)


def test_a_place_that_is_unreachable_or_no_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        handler.create(parameters(str(tmp_path / "file" / "run")))
    assert str(tmp_path) in str(caught.value)


def test_a_store_that_cannot_create_if_absent_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unconditional(MemoryStore):
        capabilities = Capabilities(conditional_create=False, atomic_put=True, ranged_read=True)

    class Lying(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            self.put(key, [data])
            return True

    for store in (Unconditional(), Lying()):
        monkeypatch.setattr(endpoint, "open_store", lambda *_, store=store, **__: open_store(store))
        with pytest.raises(StoreError) as caught:
            handler.create(parameters("memory://x"))
        assert caught.value.kind is ErrorKind.UNTRUSTWORTHY_STORE
        assert "resilient doctor" in str(caught.value.hint)


def test_settings_are_checked_by_name_and_value() -> None:
    assert read_conf({"timeout": 900, "rank": 0}) == Conf(), "what torchrun adds is not for us"
    assert read_conf({"join_timeout": "10min", "ping_timeout": "2"}) == Conf(join_timeout=600, ping_timeout=2)
    assert not read_conf({"check_command": "0"}).check_command
    with pytest.raises(UsageError, match="'last_cal_timeout' is no setting") as caught:
        read_conf({"last_cal_timeout": "5"})
    assert "last_call_timeout" in str(caught.value.hint)
    with pytest.raises(UsageError, match="join_timeout is 'soon': it must be a duration"):
        read_conf({"join_timeout": "soon"})
    with pytest.raises(UsageError, match="check_command is 'maybe': it must be 0 or 1"):
        read_conf({"check_command": "maybe"})
    with pytest.raises(UsageError, match="check is 'full': it must be off or light"):
        read_conf({"check": "full"})


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RESILIENT_NODE_DIR", "")
    monkeypatch.setenv("RESILIENT_EXITS_DIR", str(tmp_path / "exits"))
    made = handler.create(parameters(str(tmp_path / "place"), check_command="0", local_addr="127.0.0.1"))
    yield made
    made._leave()


def test_what_was_said_of_a_round_that_did_not_come_about_is_not_said_to_the_next_workers(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = agent._connect

    def fail_once(closed: Any, membership: Any) -> Any:
        monkeypatch.setattr(agent, "_connect", connect)
        agent._me.node.ask(Asked(kind="resize", why="a node has come"))
        agent._me.node.restart()
        membership.reform = "a member is lost"

    monkeypatch.setattr(agent, "_connect", fail_once)
    agent.next_rendezvous()
    assert agent._membership.closed.round == 2
    assert not agent._me.node.restarting()
    assert agent._me.node.asked_last() is None
    assert [thread.name for thread in threading.enumerate()].count("resilient-membership") == 1


def test_of_rounds_that_are_long_over_only_what_they_are_walked_by_stays(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "_ROUNDS_KEPT", 2)
    for _ in range(4):
        agent.next_rendezvous()
    for thread in threading.enumerate():
        if thread.name == "resilient-old-rounds":
            thread.join(10)
    ledger = agent._me.ledger
    assert [ledger.names(number) for number in (1, 2)] == [{"closed"}, {"closed"}]
    assert [f"join/{agent._me.nonce}" in ledger.names(number) for number in (3, 4)] == [True, True]
    newest = Ledger(agent._store, "job").newest_closed()
    assert newest is not None
    assert newest.round == 4


def test_a_node_that_never_comes_into_its_rounds_is_named_and_not_waited_for_for_ever(
    agent: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handler, "_READY_S", 0.3)
    monkeypatch.setattr(TCPStore, "check", lambda *_: False)
    with pytest.raises(RendezvousTimeoutError, match="3 rounds in a row") as caught:
        agent.next_rendezvous()
    assert f"node 0 ({agent._me.agent.title}) did not come to the key-value server" in str(caught.value)
    assert len([told for told in caplog.messages if "did not come to" in told]) == 3


def test_directories_of_agents_that_were_killed_are_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = directories.make_directory()
    program = "from resilient.elastic.directories import make_directory; print(make_directory())"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    dead = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    (tmp_path / "resilient-node-new").mkdir()
    assert directories.collect() == [Path(dead)]
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "resilient-node-new"])
