from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from resilient.config import Process, Settings, parse_bandwidth, parse_duration, read_process, read_settings
from resilient.errors import ErrorKind, UsageError


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_arguments_beat_the_environment_beats_the_project_beats_the_defaults(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    project(tmp_path, '[tool.resilient]\nevery = "5min"\nkeep = 7\nmax_failed_saves = 9\nstorage_options = {key = "k"}')
    environ = {"RESILIENT_KEEP": "8", "RESILIENT_MAX_FAILED_SAVES": "2", "HOME": "/"}
    found = read_settings({"max_failed_saves": 1}, environ=environ, directory=below)
    assert (found.max_failed_saves, found.keep, found.every, found.resume) == (1, 8, "5min", "auto")
    assert found.storage_options == {"key": "k"}


def test_only_the_nearest_project_counts(tmp_path: Path) -> None:
    below = tmp_path / "a"
    below.mkdir()
    project(tmp_path, "[tool.resilient]\nkeep = 7")
    project(below, "[project]\nname = 'x'")
    assert read_settings(environ={}, directory=below) == Settings()


def test_text_is_read_as_what_the_setting_is(tmp_path: Path) -> None:
    environ = {
        "RESILIENT_EVERY": "500",
        "RESILIENT_TAKEOVER": "Yes",
        "RESILIENT_OVERLAP": "off",
        "RESILIENT_STAGING_SLOTS": "2",
        "RESILIENT_PEER_TIMEOUT_S": "2min",
        "RESILIENT_COMMIT_TIMEOUT_S": "7.5",
        "RESILIENT_STORAGE_OPTIONS": '{"endpoint_url": "http://x"}',
        "RESILIENT_TIERS": "memory,/nvme/checkpoints",
        "RESILIENT_TIER_EVERY": "10",
        "RESILIENT_PEER_COPIES": "1",
        "RESILIENT_NODE_LABEL": "rack 7",
        "RESILIENT_METRICS_PORT": "9400",
        "RESILIENT_METRICS_FILE": "/textfile/resilient.prom",
        "RESILIENT_OBSERVERS": "ours.telemetry:to_log, ours.telemetry:Counter.add",
        "RESILIENT_RPO": "2min",
        "RESILIENT_OVERHEAD_BUDGET": "2%",
    }
    found = read_settings(environ=environ, directory=tmp_path)
    assert (found.every, found.takeover, found.peer_timeout_s, found.commit_timeout_s) == (500, True, 120.0, 7.5)
    assert found.storage_options == {"endpoint_url": "http://x"}
    assert (found.metrics_port, found.metrics_file) == (9400, "/textfile/resilient.prom")
    assert found.observers == ("ours.telemetry:to_log", "ours.telemetry:Counter.add")
    assert (found.rpo, found.overhead_budget) == (120.0, 0.02)
    assert (found.overlap, found.staging_slots) == (False, 2)
    assert (found.tiers, found.tier_every) == (("memory", "/nvme/checkpoints"), 10)
    assert (found.peer_copies, found.node_label) == (1, "rack 7")
    assert read_settings(environ={"RESILIENT_TIERS": ""}, directory=tmp_path).tiers == ()


WRONG = {
    "every": "often",
    "keep": "none",
    "resume": "maybe",
    "strict": "perhaps",
    "takeover": "2",
    "overlap": "sometimes",
    "staging_slots": "3",
    "max_failed_saves": "0",
    "max_unsaved": "0s",
    "rpo": "-2min",
    "overhead_budget": "110%",
    "max_demotions": "-1",
    "max_failed_attempts": "0",
    "commit_timeout_s": "soon",
    "restore_timeout_s": "-1",
    "peer_timeout_s": "0",
    "heartbeat_s": "1 fortnight",
    "chunk_nbytes": "4MiB",
    "compress": "zip",
    "max_bandwidth": "200 Mbps",
    "storage_options": "[1]",
    "tiers": "memory,here",
    "tier_every": "often",
    "peer_copies": "2",
    "on_hang": "panic",
    "watch_every_s": "0",
    "hang_after_s": "long",
    "hang_floor_s": "-1",
    "compare_every_s": "now",
    "node_label": "",
    "grace_s": "-1",
    "stop_signals": "SIGKILL",
    "stop_file": "",
    "notices": "ibm",
    "notices_url": "",
    "policy": "perhaps",
    "rules": "",
    "on_nonfinite": "ignore",
    "on_spike": "jump",
    "compare_replicas": "often",
    "metrics_port": "70000",
    "metrics_file": "/textfile/resilient.txt",
    "observers": "print",
    "journal_every_s": "never",
    "sla": "150%",
    "picture_every": "now and then",
    "sample_machine_s": "-1s",
    "colour": "red",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_an_error_that_names_its_source(name: str, tmp_path: Path) -> None:
    assert {each.name for each in fields(Settings)} < set(WRONG)
    sources: dict[str, Callable[[], Settings]] = {
        f"argument {name}": lambda: read_settings({name: WRONG[name]}, environ={}, directory=tmp_path),
        f"RESILIENT_{name.upper()}": lambda: read_settings(
            environ={f"RESILIENT_{name.upper()}": WRONG[name]}, directory=tmp_path
        ),
        str(tmp_path / "pyproject.toml"): lambda: read_settings(
            environ={}, directory=project(tmp_path, f'[tool.resilient]\n{name} = "{WRONG[name]}"')
        ),
    }
    for source, read in sources.items():
        with pytest.raises(UsageError) as caught:
            read()
        assert caught.value.kind is ErrorKind.INVALID_SETTING
        assert source in str(caught.value)


def test_a_broken_project_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pyproject\.toml is not TOML"):
        read_settings(environ={}, directory=project(tmp_path, "[tool"))


def test_the_launcher_says_which_process_this_is() -> None:
    assert read_process({}) == Process()
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "j",
    }
    assert read_process(environ) == Process(
        rank=3, world_size=4, local_rank=1, local_world_size=2, elastic_id="j", master="a:1"
    )


@pytest.mark.parametrize("environ", [{"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {"RANK": "-1"}], ids=str)
def test_a_launcher_that_contradicts_itself_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        read_process(environ)


def test_bandwidths() -> None:
    texts = ["5B/s", "1kB/s", "200MB/s", "1.5 GiB/s", "10Gbit/s", "2KiB/s"]
    assert [parse_bandwidth(text) for text in texts] == [5, 1e3, 2e8, 1.5 * 2**30, 1.25e9, 2_048]
    for wrong in ("0MB/s", "200", "200MB", "200 Mb/s", "-1MB/s", "MB/s", ""):
        with pytest.raises(ValueError, match="must be a bandwidth"):
            parse_bandwidth(wrong)


def test_durations() -> None:
    texts = ["250ms", "90s", "10min", "2h", "1d", "1.5h", 3, 0.5]
    assert [parse_duration(text) for text in texts] == [0.25, 90, 600, 7200, 86400, 5400, 3, 0.5]
