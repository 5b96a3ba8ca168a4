"""Which settings hold, and which process this is: the only reader of the environment."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from resilient.errors import ErrorKind, UsageError

_PREFIX: Final = "RESILIENT_"
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BANDWIDTH: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(|[kMGT]|[KMGT]i)(B|bit)/s\s*")
_COMPRESS: Final = re.compile(r"auto|off|zstd:([1-9]|1\d|2[0-2])")
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_STOP_SIGNALS: Final = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"}
_NOTHING: Final[Mapping[str, object]] = {}
_NO_SETTINGS: Final = frozenset({"RESILIENT_NODE_DIR", "RESILIENT_EXITS_DIR"})
"""What an agent tells its workers about their process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be set by argument, by ``RESILIENT_<NAME>`` or in ``[tool.resilient]``, in this order of precedence.

    Every name that ends in ``_s`` takes seconds, or text such as ``"10min"``.
    """

    every: str | int = "auto"  # "auto", a number of steps, or a duration such as "90s"
    rpo: float | None = None  # how old the state may be that a failure leaves; for every="auto"; None: as it pays
    overhead_budget: float = 0.05  # the share of the time that saving may take, for "auto" without rpo
    keep: int = 3  # how many of the newest checkpoints stay
    resume: str = "auto"  # "auto": fresh only where nothing is; "required": never fresh; "never": always fresh
    strict: bool = True  # False: a restore accepts names that only one side has, and reports them
    takeover: bool = False  # start although another launch seems to be alive in this place
    max_failed_saves: int = 5  # so many saves that fail in a row end the run
    max_unsaved: float | None = None  # the age of the newest committed state that ends the run; None: any
    max_demotions: int = 3  # so many checkpoints in a row may be marked failed by the run itself
    on_nonfinite: str = "stop"  # of what run.watch sees, twice alike: "stop", "rollback", "skip", "report"
    on_spike: str = "report"  # the same for a value of five times what is usual
    compare_replicas: int = 100  # parameters are compared between replicas within so many steps; 0: never
    max_failed_attempts: int = 3  # so many failures in a row, alike and at the same step, end in a verdict
    commit_timeout_s: float = 600.0  # from the start of a save to its commit
    restore_timeout_s: float = 3600.0  # for all ranks to have read their part
    peer_timeout_s: float = 300.0  # for one word from another rank
    heartbeat_s: float = 5.0  # between two signs of life in the store
    chunk_nbytes: int = 4 << 20  # the unit that is digested, and read, as a whole
    overlap: bool = True  # copy what only the optimizer changes while the next turn runs
    staging_slots: str | int = "auto"  # states in the arena: 1, 2, or "auto": 2 if they fit in half the memory
    compress: str = "auto"  # "off", "zstd:1" to "zstd:22", or "auto": where it makes saves durable sooner
    max_bandwidth: str | None = None  # of the uploads of one rank, such as "200MB/s"; None: no limit
    storage_options: Mapping[str, Any] = field(default_factory=dict)  # handed to the store
    grace_s: float | None = None  # from a signal to the end by force; None: what the launcher gives, as far as known
    stop_signals: str = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # those that ask for a stop; "none": they are the program's
    stop_file: str | None = None  # a file that asks for a stop once somebody makes it
    notices: str = "off"  # whose metadata service says that the machine goes: "aws", "gcp", "azure"
    notices_url: str | None = None  # where that service is, if not where it usually is
    tiers: tuple[str, ...] = ()  # of each node, nearest first: "memory", or directories on disks of the node
    tier_every: str | int = "auto"  # how often a state goes to the tiers alone; like every
    peer_copies: int = 0  # on how many other nodes there is a copy of what is in the first tier: 0 or 1
    node_label: str | None = None  # of what fails together: a copy goes to a node with another label; None: the host
    on_hang: str = "report"  # "restart": end the rank, so that its launcher starts all anew; "off": look for no hangs
    watch_every_s: float = 1.0  # the interval in which a rank gives signs of life; silence is seen within three
    hang_after_s: float = 1800.0  # a section of which nothing is known lasts that long at most
    hang_floor_s: float = 60.0  # and any other one at least so long before it is a hang
    compare_every_s: float = 30.0  # between two reports of each rank's times, by which slow ones are found
    picture_every: int = 0  # of so many steps one at most is profiled, for pictures of what they exchange; 0: none
    sample_machine_s: float = 0.1  # between two looks at processors, links and power, by one rank a node; 0: none
    policy: str = "act"  # what restarts do about failures: "act", or "observe": only say it
    rules: str | None = None  # a TOML file by which failures are recognized before the rules of this package
    metrics_port: int | None = None  # numbers for Prometheus over HTTP: on this port, plus the local rank
    metrics_file: str | None = None  # the same in files for its node exporter: a path that ends in ".prom"
    journal_every_s: float = 5.0  # between two writings of what happens on a rank, beside the checkpoints
    sla: float | None = None  # the share of productive time that is promised; falling below it is told; None: none is
    observers: tuple[Any, ...] = ()  # functions that get every event, or their names: "package.module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What the launcher says about this process; a plain ``python train.py`` is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    elastic_id: str | None = None  # torchelastic's id of the job, if it started this process
    master: str | None = None  # address and port of the rendezvous
    node_dir: str | None = None  # where the agent of this node and its workers talk: see `resilient.elastic.node`
    error_file: str | None = None  # torchelastic's name for a file that is this worker's alone
    exits_dir: str | None = None  # where the launcher wants to read how its workers ended
    shutdown_timeout: str | None = None  # seconds that torchelastic gives after a signal, if the environment says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a scheduler says about the job that this process is part of; None where nobody says anything."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    local_task: int = 0  # which of the tasks that were started on this node
    job: str | None = None  # the same on all nodes, and after a requeue
    address: str | None = None  # under which the other nodes reach this one


def read_settings(
    arguments: Mapping[str, object] = _NOTHING,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Return the settings that hold: arguments over ``RESILIENT_*`` over ``pyproject.toml`` over the defaults.

    Args:
        arguments: what the caller passed by name.
        environ: instead of the environment.
        directory: where to look for ``pyproject.toml``, and upwards from; the working directory by default.

    Raises:
        UsageError: kind ``invalid-setting``, for an unknown name, a value of the wrong type, or one that means nothing
            without another; it names the source.
    """
    found: dict[str, object] = {}
    found |= _checked(*_from_project(directory or Path.cwd()))
    found |= _checked(
        _from_environment(os.environ if environ is None else environ), lambda name: _PREFIX + name.upper()
    )
    found |= _checked(arguments, lambda name: f"argument {name}")
    settings = Settings(**found)  # type: ignore[arg-type]  # _checked has made each value what its field says
    if settings.peer_copies and not settings.tiers:
        raise _invalid(
            "peer_copies",
            "is 1, and there is no tier of which another node could keep a copy",
            'set tiers as well, such as tiers=["memory"]',
        )
    return settings


def read_process(environ: Mapping[str, str] | None = None) -> Process:
    """Return what the launcher says about this process.

    Raises:
        UsageError: kind ``invalid-setting``, for variables that contradict each other.
    """
    source = os.environ if environ is None else environ
    rank, world_size = _number(source, "RANK", 0), _number(source, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise _invalid("RANK", f"is {rank}, with a WORLD_SIZE of {world_size}")
    address, port = source.get("MASTER_ADDR"), source.get("MASTER_PORT")
    return Process(
        rank=rank,
        world_size=world_size,
        local_rank=_number(source, "LOCAL_RANK", 0),
        local_world_size=max(1, _number(source, "LOCAL_WORLD_SIZE", 1)),
        elastic_id=source.get("TORCHELASTIC_RUN_ID"),
        master=f"{address}:{port}" if address and port else None,
        node_dir=source.get("RESILIENT_NODE_DIR"),
        error_file=source.get("TORCHELASTIC_ERROR_FILE"),
        exits_dir=source.get("RESILIENT_EXITS_DIR"),
        shutdown_timeout=source.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    )


def read_cluster(environ: Mapping[str, str] | None = None) -> Cluster:
    """Return what SLURM or a manifest for Kubernetes says about this job.

    Raises:
        UsageError: kind ``invalid-setting``, for what should be a number and is none.
    """
    source = os.environ if environ is None else environ
    return Cluster(
        nodes=_number(source, "SLURM_NNODES", 0) or None,
        gpus_per_node=_number(source, "SLURM_GPUS_ON_NODE", 0) or None,
        local_task=_number(source, "SLURM_LOCALID", 0),
        job=source.get("SLURM_JOB_ID") or None,
        address=source.get("POD_IP") or None,
    )


def environment_with(**changes: str) -> dict[str, str]:
    """Return the environment for a process that this one starts."""
    return {**os.environ, **changes}


def export(**changes: str) -> None:
    """Set environment variables of this process, for those that it starts without saying with what: torchelastic."""
    os.environ.update(changes)


def export_unless_set(**values: str) -> None:
    """Set those environment variables of this process that are not set, for libraries that read them later."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def parse_duration(value: object) -> float:
    """Return seconds: a number is seconds, text needs a unit (``"250ms"``, ``"90s"``, ``"10min"``, ``"2h"``, ``"1d"``).

    Raises:
        ValueError: it is no duration, or not a positive one.
    """
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)) and match[2] in _UNITS_S:
        seconds = float(match[1]) * _UNITS_S[match[2]]
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError('must be a duration, such as "90s", "10min" or "2h"')
    return seconds


def parse_bandwidth(value: str) -> float:
    """Return bytes a second: ``"200MB/s"``, ``"1.5GiB/s"``, ``"10Gbit/s"``.

    Raises:
        ValueError: it is no bandwidth, or nothing.
    """
    match = _BANDWIDTH.fullmatch(value)
    if match is None or not float(match[1]):
        raise ValueError('must be a bandwidth, such as "200MB/s" or "10Gbit/s"')
    thousand = 1024 if match[2].endswith("i") else 1000
    exponent = " KMGT".index(match[2][:1].upper() or " ")
    return float(match[1]) * float(thousand**exponent) / (8 if match[3] == "bit" else 1)


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(_PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(_PREFIX) and name not in _NO_SETTINGS
    }


def _from_project(directory: Path) -> tuple[Mapping[str, object], Callable[[str], str]]:
    for folder in (directory, *directory.parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("resilient", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise _invalid(str(path), f"is not TOML: {error}") from error
        return table, functools.partial("[tool.resilient] {1} in {0}".format, path)
    return {}, str


def _checked(values: Mapping[str, object], source: Callable[[str], str]) -> dict[str, object]:
    checked = {}
    for name, value in values.items():
        if name not in _PARSERS:
            raise _invalid(source(name), "is not a setting", f"the settings are {', '.join(_PARSERS)}")
        try:
            checked[name] = _PARSERS[name](value)
        except ValueError as error:
            raise _invalid(source(name), f"is {value!r}: it {error}") from error
    return checked


def _invalid(source: str, what: str, hint: str | None = None) -> UsageError:
    return UsageError(f"{source} {what}", kind=ErrorKind.INVALID_SETTING, hint=hint)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise _invalid(name, f"is {text!r}: it must be a whole number")
    return int(text)


def _count(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int or value < 1:
        raise ValueError("must be a whole number of at least 1")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
        value = float(value)
    return parse_duration(value)


def _flag(value: object) -> bool:
    known: dict[object, bool] = {True: True, "true": True, "yes": True, "on": True, "1": True}
    known |= {False: False, "false": False, "no": False, "off": False, "0": False}
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, bool | str) or key not in known:
        raise ValueError("must be true or false")
    return known[key]


def _every(value: object) -> str | int:
    if value == "auto":
        return "auto"
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
        return _count(value)
    if not isinstance(value, str):
        raise ValueError('must be "auto", a number of steps, or a duration such as "90s"')  # noqa: TRY004 -- see _checked
    parse_duration(value)
    return value


def _compress(value: object) -> str:
    if not isinstance(value, str) or not _COMPRESS.fullmatch(value):
        raise ValueError('must be "auto", "off" or "zstd:N" with a level N from 1 to 22')
    return value


def _max_bandwidth(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError('must be a bandwidth, such as "200MB/s" or "10Gbit/s"')  # noqa: TRY004 -- see _checked
    parse_bandwidth(value)
    return value


def _max_unsaved(value: object) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    return _seconds(value)


def _share(value: object) -> float:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", value)):
        value = float(match[1]) / (100 if match[2] else 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError('must be a share between 0 and 1, such as 0.05 or "5%"')
    return float(value)


def _sla(value: object) -> float | None:
    return None if value is None or str(value).strip().lower() == "none" else _share(value)


def _whole(value: object) -> int:
    return 0 if str(value).strip() == "0" else _count(value)


def _pause(value: object) -> float:
    return 0.0 if str(value).strip() in ("0", "0.0") else _seconds(value)


def _grace(value: object) -> float | None:
    return None if value is None or value == "auto" else _seconds(value)


def _stop_signals(value: object) -> str:
    names = [name.strip() for name in str(value).split(",")]
    if not isinstance(value, str) or not (set(names) <= _STOP_SIGNALS or names == ["none"]):
        raise ValueError(f'must be "none", or some of {", ".join(sorted(_STOP_SIGNALS))} with commas between')
    return ",".join(names)


def _notices(value: object) -> str:
    if value not in ("off", "aws", "gcp", "azure"):
        raise ValueError('must be "off", "aws", "gcp" or "azure"')
    return str(value)


def _text(value: object) -> str | None:
    if value is not None and not (isinstance(value, str | os.PathLike) and os.fspath(value)):
        raise ValueError("must be text")
    return None if value is None else str(value)


def _copies(value: object) -> int:
    if isinstance(value, bool) or str(value).strip() not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return int(str(value))


def _tiers(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) and value else value or ()
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and _is_tier(name.strip()) for name in names
    ):
        raise ValueError('must be a list of "memory" and absolute paths (in the environment: with commas between)')
    return tuple(dict.fromkeys(name.strip() for name in names))


def _is_tier(name: str) -> bool:
    return name == "memory" or Path(name).expanduser().is_absolute()


def _policy(value: object) -> str:
    if value not in ("act", "observe"):
        raise ValueError('must be "act" or "observe"')
    return str(value)


def _port(value: object) -> int | None:
    found = None if value is None or str(value).strip().lower() == "none" else _count(value)
    if found is not None and found > 65535:
        raise ValueError("must be a port, from 1 to 65535")
    return found


def _metrics_file(value: object) -> str | None:
    path = _text(value)
    if path is not None and not path.endswith(".prom"):
        raise ValueError('must end in ".prom": the node exporter reads no other files')
    return path


def _observers(value: object) -> tuple[Any, ...]:
    found = value.split(",") if isinstance(value, str) and value else value or ()
    if not isinstance(found, list | tuple) or not all(
        callable(each) or (isinstance(each, str) and re.fullmatch(r"\s*[\w.]+:[\w.]+\s*", each)) for each in found
    ):
        raise ValueError('must be a list of functions or of "package.module:function" (as text: with commas between)')
    return tuple(each.strip() if isinstance(each, str) else each for each in found)


def _on_hang(value: object) -> str:
    if value not in ("report", "restart", "off"):
        raise ValueError('must be "report", "restart" or "off"')
    return str(value)


def _resume(value: object) -> str:
    if value not in ("auto", "required", "never"):
        raise ValueError('must be "auto", "required" or "never"')
    return str(value)


def _on_sick(value: object) -> str:
    if value not in ("stop", "rollback", "skip", "report"):
        raise ValueError('must be "stop", "rollback", "skip" or "report"')
    return str(value)


def _slots(value: object) -> str | int:
    if value == "auto":
        return "auto"
    if str(value).strip() not in ("1", "2"):
        raise ValueError('must be "auto", 1 or 2')
    return int(str(value))


def _options(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)  # what it raises for text that is no JSON is a ValueError too
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping (in the environment: a JSON object)")  # noqa: TRY004 -- see _checked
    return dict(value)


def _parser(name: str) -> Callable[[object], object]:
    special: dict[str, Callable[[object], object]] = {
        "every": _every,
        "resume": _resume,
        "strict": _flag,
        "on_nonfinite": _on_sick,
        "on_spike": _on_sick,
        "compare_replicas": _whole,
        "overlap": _flag,
        "staging_slots": _slots,
        "takeover": _flag,
        "compress": _compress,
        "max_bandwidth": _max_bandwidth,
        "max_unsaved": _max_unsaved,
        "rpo": _max_unsaved,
        "sla": _sla,
        "overhead_budget": _share,
        "max_demotions": _whole,
        "storage_options": _options,
        "grace_s": _grace,
        "stop_signals": _stop_signals,
        "stop_file": _text,
        "notices": _notices,
        "notices_url": _text,
        "tiers": _tiers,
        "tier_every": _every,
        "peer_copies": _copies,
        "node_label": _text,
        "on_hang": _on_hang,
        "picture_every": _whole,
        "sample_machine_s": _pause,
        "policy": _policy,
        "rules": _text,
        "metrics_port": _port,
        "metrics_file": _metrics_file,
        "observers": _observers,
    }
    return special.get(name) or (_seconds if name.endswith("_s") else _count)


_PARSERS: Final = {each.name: _parser(each.name) for each in fields(Settings)}
