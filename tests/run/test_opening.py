"""How a run starts: the process group, the device, and a place that is there, the same one for all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import resilient
from resilient.config import Settings, read_process
from resilient.errors import ErrorKind, StoreError
from resilient.run import opening
from resilient.run.opening import process_group
from tests.lives import Life
from tests.s3_server import S3Server


@pytest.mark.field_report("BR-074")
def test_the_device_is_chosen_by_the_rank_within_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(("group", backend)))
    monkeypatch.setattr(opening, "rendezvous", lambda _: iter([(dist.HashStore(), 5, 8)]))
    monkeypatch.setattr(opening, "meet", lambda *_, **__: "this-life")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(("end", None)))
    launcher = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    with process_group(read_process(launcher), Settings()):
        assert calls == [("device", 1), ("group", "cpu:gloo,cuda:nccl")]
    assert calls[-1] == ("end", None)


@pytest.mark.s3
@pytest.mark.field_report("BR-145")
def test_a_bucket_that_does_not_exist_ends_the_program_before_it_trains(s3_server: S3Server) -> None:
    @resilient.train("s3://no-such-bucket/run", storage_options=s3_server.options())
    def main(run: resilient.Run) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(StoreError, match="no-such-bucket") as caught:
        main()
    assert caught.value.kind is ErrorKind.NO_SUCH_BUCKET


def train_in_a_folder_of_its_own(folder: str) -> None:
    mine = Path(folder, os.environ["RANK"])
    mine.mkdir()
    os.chdir(mine)

    @resilient.train("run", every=1, peer_timeout_s=10.0)
    def main(run: resilient.Run) -> None:
        run.track(state={"w": torch.zeros(4)})
        for _ in run.steps(range(3), total=3):
            pass

    main()


@pytest.mark.field_report("BR-034", "BR-152", "BR-182", "BR-185")
def test_a_relative_path_that_is_another_directory_on_another_rank_is_refused_at_the_start(tmp_path: Path) -> None:
    life = Life(2, tmp_path / "logs", train_in_a_folder_of_its_own, str(tmp_path))
    assert all(life.wait()), life.output()
    # Of rank 1 it depends on how long rank 0 stays, which keeps the store through which they talk here.
    told = f"rank 1 does not find in {tmp_path}/1/run what rank 0 has written in {tmp_path}/0/run: the ranks do not"
    assert told in (tmp_path / "logs" / "rank-0.log").read_text()
    assert resilient.checkpoints(tmp_path / "0" / "run") == []
