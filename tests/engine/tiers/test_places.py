"""Where tiers lie, whom they belong to, and when they go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from resilient.catalog.process import host, started
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Process
from resilient.engine.tiers import places
from resilient.engine.tiers.places import NodeTiers, Owner, check_room, open_tiers
from resilient.errors import ErrorKind, StoreError, UsageError

PROGRAM = """
import sys
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Process
from resilient.engine.tiers.places import open_tiers
print(open_tiers(sys.argv[1], (sys.argv[2],), Process(), clock=SYSTEM_CLOCK).own[0].path)
"""


def dead(run_id: str, tier: Path) -> Path:
    """Return what a process that is gone has left in a tier."""
    words = [sys.executable, "-c", PROGRAM, run_id, str(tier)]
    path = Path(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    (path / "data").mkdir()
    (path / "data" / "object").write_bytes(bytes(1 << 16))
    return path


def opened(run_id: str, tier: Path, node: str | None = None) -> NodeTiers:
    return open_tiers(run_id, (str(tier),), Process(node_dir=node), clock=SYSTEM_CLOCK)


def test_a_node_has_one_directory_for_all_its_workers_in_all_their_lives(tmp_path: Path) -> None:
    first, again, other = (opened("run", tmp_path, node) for node in ("/a/node", "/a/node", "/another"))
    assert first.own == again.own
    assert other.own != first.own
    assert opened("another run", tmp_path, "/a/node").own != first.own
    assert first.left == again.left == other.left == (), "the agents live"


def test_what_the_dead_of_the_same_run_have_left_is_found_and_goes_when_told(tmp_path: Path) -> None:
    path = dead("run", tmp_path)
    tiers = opened("run", tmp_path)
    assert [each.path for each in tiers.left] == [str(path)]
    assert [each.name for each in tiers.all] == [str(tmp_path)] * 2
    tiers.remove_left()
    assert not path.exists()
    assert Path(tiers.own[0].path).exists()
    tiers.remove_own()
    assert not list((tmp_path / f"resilient-{os.getuid()}").iterdir())


def test_what_a_stopped_run_has_left_stays_for_a_day(tmp_path: Path) -> None:
    path = dead("stopped", tmp_path)
    opened("run", tmp_path)
    assert path.exists(), "it may be started again"
    for each in [path, *path.rglob("*")]:
        os.utime(each, (time.time() - 90000,) * 2)
    opened("run", tmp_path)
    assert not path.exists()


def test_what_cannot_be_seen_to_be_dead_is_left_alone(tmp_path: Path) -> None:
    path = dead("run", tmp_path)
    owner = Owner(host="another", pid=1, process_started="x/1", run_id="run")
    (path / "owner.json").write_bytes(msgspec.json.encode(owner))
    assert opened("run", tmp_path).left == ()
    (path / "owner.json").write_text("torn")
    assert opened("run", tmp_path).left == ()
    assert path.exists()


def test_room_is_asked_for_at_the_start_and_said_when_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = opened("run", tmp_path)
    check_room(tiers, "run", 1 << 20, available=lambda: 0)
    monkeypatch.setattr(places, "_room", lambda base, available: 1 << 20)
    with pytest.raises(StoreError, match=r"needs 2\.0 GiB on this node, and .* has room for 1\.0 MiB") as refused:
        check_room(tiers, "run", 2 << 30, available=lambda: 0)
    assert refused.value.kind is ErrorKind.NO_SPACE


def test_dead_runs_make_room_and_stay_where_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [dead(f"run {number}", tmp_path) for number in range(2)]
    os.utime(paths[0] / "data" / "object", (1, 1))
    for each in [paths[0], *paths[0].rglob("*")]:
        os.utime(each, (time.time() - 3600,) * 2)
    tiers = opened("run", tmp_path)
    free = [10]

    def room(base: Path, available: object) -> int:
        return free[0] + sum((not path.exists()) << 16 for path in paths)

    monkeypatch.setattr(places, "_room", room)
    check_room(tiers, "run", 10, available=lambda: 0)
    assert all(path.exists() for path in paths)
    check_room(tiers, "run", 1 << 16, available=lambda: 0)
    assert [path.exists() for path in paths] == [False, True], "the one that was used last stays"


@pytest.mark.parametrize("tier", ["relative/path", "/proc/nothing/here"])
def test_a_tier_that_cannot_be_is_refused(tier: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be used") as refused:
        open_tiers("run", (tier,), Process(), clock=SYSTEM_CLOCK)
    assert tier in str(refused.value)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"resilient-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"resilient-{os.getuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="only this user"):
        opened("run", tmp_path)


def test_without_tiers_nothing_is_made(tmp_path: Path) -> None:
    assert open_tiers("run", (), Process(), clock=SYSTEM_CLOCK) == NodeTiers()
    assert not list(tmp_path.iterdir())


def test_an_owner_that_lives_is_not_dead() -> None:
    owner = Owner(host=host(), pid=os.getpid(), process_started=started(os.getpid()), run_id="run")
    assert not owner.is_dead


def test_what_this_host_had_before_it_was_booted_again_is_dead() -> None:
    boot, *rest = started(os.getpid()).split("/")
    assert boot
    before = Owner(host=host(), pid=os.getpid(), process_started="/".join(["another-boot", *rest]), run_id="run")
    assert before.is_dead
    elsewhere = Owner(host=host(), pid=1, process_started=f"{boot}/pid:[1]/7", run_id="run")
    assert not elsewhere.is_dead, "another container cannot be seen"
    assert not Owner(host=host(), pid=1, process_started="", run_id="run").is_dead


def test_what_another_rank_removes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dead("other", tmp_path)
    real = os.scandir

    def vanishing(folder: object) -> object:
        if str(folder).endswith("/data"):
            raise FileNotFoundError(str(folder))
        return real(folder)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", vanishing)
    assert places._touched(path) > 0
    assert places._nbytes(path) >= 0
    monkeypatch.undo()
    assert places._nbytes(path) >= 1 << 16
    assert places._touched(tmp_path / "gone") == 0
    assert list(places._nodes(tmp_path / "gone")) == []
