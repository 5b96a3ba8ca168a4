"""What the backend refuses at once, and that torch finds it without importing anything heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from resilient.elastic import handler
from resilient.elastic.conf import Conf, read_conf
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
        monkeypatch.setattr(handler, "open_store", lambda *_, store=store, **__: open_store(store))
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
