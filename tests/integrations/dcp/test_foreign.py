"""Checkpoints that torch.distributed.checkpoint wrote with its own writer are read here: safely, verified, anywhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import resilient
from resilient.catalog.dcp.unpickling import Refused, unpickle_value
from resilient.catalog.dcp.view import DcpView, run_at
from resilient.errors import CorruptError, ErrorKind, NotFoundError, ResilientError, StoreError, UsageError
from resilient.integrations.dcp import StorageReader
from resilient.store.local import LocalStore
from tests.cli.calling import call
from tests.integrations.dcp import shards
from tests.integrations.dcp.test_round_trips import SPECS, load_with_us
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6)
VALUES: dict[str, Any] = {
    "text": "größe",
    "bytes": b"\x00\xff",
    "numbers": [1, -(2**70), 2.5, float("inf"), True, None, 1 + 2j],
    "tuple": (1, ("a",), [2]),
    "set": {1, 2},
    "frozen": frozenset({"x"}),
    "range": range(3),
    "array": bytearray(b"ab"),
    "deque": deque([1, 2], maxlen=3),
    "counter": [Counter("aab")],
    "ordered": [OrderedDict(a=1)],
    "when": [date(2020, 1, 2), datetime(2021, 3, 4, 5, 6, 7, 8, UTC), timedelta(1, 2, 3)],
    "numpy": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.1), np.array([], dtype=np.float64)],
}


def write(place: Path, state: dict[str, Any], **settings: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place, **settings))


def load(place: Path) -> torch.Tensor:
    into = {"w": torch.zeros(4, 6)}
    resilient.load(place, {"model": into}, strict=False)
    return into["w"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write(tmp_path / "step-40", {"model": {"w": WEIGHT, "b": torch.ones(3, dtype=torch.bfloat16)}, "step": 7})
    return tmp_path / "step-40"


# --- what is there is read --------------------------------------------------------------------------------------------


def write_on_ranks(url: str, mesh: tuple[int, ...]) -> None:
    state = {"model": shards.dtensors(SPECS, mesh), "plain": torch.arange(5), "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url, thread_count=2))


@pytest.mark.field_report("BR-205")
def test_what_dcp_wrote_on_4_ranks_loads_on_1_2_and_3(tmp_path: Path, ranks: Ranks) -> None:
    ranks(4).run(write_on_ranks, str(tmp_path), (4,))
    for size in (1, 2, 3):
        assert ranks(size).run(load_with_us, str(tmp_path), (size,)) == [[]] * size, size


def of(values: Any) -> Any:
    """Return values in a form that compares arrays too."""
    return repr(values)


@pytest.mark.parametrize("settings", [{}, {"thread_count": 2}, {"single_file_per_rank": False}], ids=str)
def test_every_kind_of_entry_comes_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.uint16, torch.bool]
    tensors = {str(kind): torch.arange(6).to(kind) for kind in [*kinds, torch.complex64, torch.int64]}
    tensors |= {
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "transposed": WEIGHT.t(),
        "a view": WEIGHT[1:3, ::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    write(tmp_path, {"tensors": tensors, "values": VALUES, "list": [torch.ones(2), 3]}, **settings)
    into = {name: torch.zeros_like(tensor.detach()) for name, tensor in tensors.items()}
    rest: dict[str, Any] = {"list": [torch.zeros(2), 0]}
    values: dict[str, Any] = dict.fromkeys(VALUES)
    resilient.load(tmp_path, {"tensors": into, "values": values})
    for name, tensor in tensors.items():
        assert torch.equal(shards.bits(into[name]), shards.bits(tensor)), name
    assert of(values["ordered"]) == of([{"a": 1}]), "DCP takes dictionaries in lists apart"
    assert of(values["counter"]) == of([{"a": 2, "b": 1}])
    for name in VALUES.keys() - {"ordered", "counter"}:
        assert of(values[name]) == of(VALUES[name]), name
    dcp.load(rest, storage_reader=StorageReader(tmp_path))
    assert rest["list"][1] == 3
    assert torch.equal(rest["list"][0], torch.ones(2))


def test_the_command_line_shows_and_copies_it_without_torch(place: Path, tmp_path: Path) -> None:
    found = json.loads(call("show", place, "--json").stdout)
    assert (found["step"], found["items"]) == (40, ["model", "state_dict"])
    assert {(one["name"], one["dtype"], tuple(one["shape"])) for one in found["tensors"]} == {
        ("w", "float32", (4, 6)),
        ("b", "bfloat16", (3,)),
    }
    assert "40" in call("ls", place).stdout
    assert call("verify", place, "--deep").stdout.startswith("ok")
    call("restore", place, tmp_path / "run")
    assert call("verify", tmp_path / "run", "--deep").stdout.startswith("ok")
    assert [checkpoint.step for checkpoint in resilient.checkpoints(tmp_path / "run")] == [40]
    rest = {"step": 0}
    resilient.load(tmp_path / "run", {"state_dict": rest})
    assert rest == {"step": 7}
    assert torch.equal(load(tmp_path / "run"), WEIGHT)
    call("restore", f"{place}@40", tmp_path / "out", "--format", "safetensors")
    assert (tmp_path / "out" / "model.safetensors").exists()
    call("restore", place, tmp_path / "pt", "--format", "torch")
    assert torch.equal(torch.load(tmp_path / "pt" / "model.pt", weights_only=True)["w"], WEIGHT)
    program = (
        "import sys; from resilient.cli.main import main\n"
        f"main(['restore', {str(place)!r}, {str(tmp_path / 'again')!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_nothing_is_written_there(place: Path) -> None:
    before = {path: path.read_bytes() for path in place.iterdir()}
    view = run_at(LocalStore(place))
    assert isinstance(view, DcpView)
    for act in (lambda: view.put("a", [b""]), lambda: view.create("a", b""), lambda: view.delete(".metadata")):
        with pytest.raises(StoreError, match="only read here"):
            act()
    with pytest.raises(UsageError, match="is not a run"):
        resilient.save(place, 1, {"model": {"w": WEIGHT}})
    load(place)
    assert {path: path.read_bytes() for path in place.iterdir()} == before


def test_one_tensor_is_read_without_the_others(place: Path) -> None:
    (checkpoint,) = resilient.checkpoints(place)
    assert torch.equal(checkpoint.tensor("model.w"), WEIGHT)
    with pytest.raises(NotFoundError):
        checkpoint.tensor("model.nothing")


# --- what is damaged is not -------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_tensor_is_never_loaded(place: Path) -> None:
    """torch does not look at the checksums that it writes (E3 of the study)."""
    file = place / "__0_0.distcp"
    content = file.read_bytes()
    at = content.index(WEIGHT.numpy().tobytes())
    dice = random.Random("flip")
    for bit in dice.sample(range(8 * at, 8 * (at + WEIGHT.nbytes)), 30):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(CorruptError, match=r"model\.w") as caught:
            load(place)
        assert caught.value.kind is ErrorKind.BAD_DIGEST
    assert call("verify", place, code=12).stdout.startswith("bad")
    call("restore", place, place.parent / "out", code=12)
    file.write_bytes(content[: at + 8])
    with pytest.raises(CorruptError):
        load(place)
    file.unlink()
    with pytest.raises(CorruptError, match="is missing"):
        load(place)


def test_damage_anywhere_is_an_error_of_ours_or_harmless(
    place: Path, tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    files = {name: (place / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    for seed in range(count(150, 10_000)):
        dice = random.Random(seed)
        name, content = dice.choice(sorted(files.items()))
        changed = bytearray(content)
        for _ in range(dice.randint(1, 4)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        if dice.random() < 0.2:
            del changed[dice.randrange(len(changed)) :]
        (place / name).write_bytes(changed)
        with suppress(ResilientError):
            assert torch.equal(load(place), WEIGHT), f"seed {seed}"
        (place / name).write_bytes(content)
    assert torch.equal(load(place), WEIGHT)


@pytest.mark.parametrize("lost", ["entry", "part"])
def test_a_checkpoint_that_dcp_left_incomplete_is_refused(place: Path, lost: str) -> None:
    """DCP publishes it as complete when a helper thread fails (E1 of the study)."""
    with (place / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    if lost == "entry":
        metadata.storage_data = {key: value for key, value in metadata.storage_data.items() if key.fqn != "model.b"}
    else:
        metadata.state_dict_metadata["model.b"].chunks[0].sizes = torch.Size([2])
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"model\.b") as caught:
        load(place)
    assert caught.value.kind is ErrorKind.INCOMPLETE


def test_an_extension_that_is_not_known_here_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"model": {"w": WEIGHT}}, _extensions=[ZStandard()])
    with pytest.raises(UsageError, match=r"stream\.zstd"):
        load(tmp_path)


# --- what would run code does not -------------------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, how: str, mark: Path) -> None:
        self.how = how
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        match self.how:
            case "posix.system":
                return os.system, (f"touch {self.mark}",)
            case "builtins.eval":
                return eval, (f"open({str(self.mark)!r}, 'w')",)
            case "builtins.getattr":
                return getattr, (Path(self.mark), "touch")
            case "subprocess.Popen":
                return subprocess.Popen, (["touch", str(self.mark)],)
            case "torch.serialization.load":
                return torch.load, (str(self.mark),)
        raise AssertionError(self.how)


BOMBS = ["posix.system", "builtins.eval", "builtins.getattr", "subprocess.Popen", "torch.serialization.load"]


@pytest.mark.parametrize("how", BOMBS)
@pytest.mark.field_report("BR-198")
def test_a_bomb_in_the_metadata_does_not_go_off(place: Path, tmp_path: Path, how: str) -> None:
    mark = tmp_path / "mark"
    with (place / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.planner_data["bomb"] = Bomb(how, mark)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    for act in (
        lambda: load(place),
        lambda: resilient.checkpoints(place),
        lambda: StorageReader(place).read_metadata(),
    ):
        with pytest.raises(CorruptError, match="refused, and not run") as caught:
            act()
        assert how in str(caught.value)
    for command in ("ls", "show", "verify"):
        call(command, place, code=12)
    call("restore", place, tmp_path / "out", code=12)
    assert not mark.exists()
    # That it would go off is no claim: DCP's own reader lights it.
    if how == "posix.system":
        dcp.FileSystemReader(place).read_metadata()
        assert mark.exists()


@pytest.mark.parametrize("how", BOMBS)
@pytest.mark.field_report("BR-199")
def test_a_bomb_in_a_value_does_not_go_off_and_the_rest_loads(tmp_path: Path, how: str) -> None:
    mark, place = tmp_path / "mark", tmp_path / "place"
    write(place, {"model": {"w": WEIGHT}, "bomb": Bomb(how, mark), "step": 7})
    assert torch.equal(load(place), WEIGHT)
    rest = {"bomb": None, "step": 0}
    name = how.rpartition(".")[2]  # old protocols call some modules otherwise
    with pytest.raises(UsageError, match=name):
        resilient.load(place, {"state_dict": rest})
    with pytest.raises(dcp.CheckpointException, match=name):
        dcp.load({"bomb": None}, storage_reader=StorageReader(place))
    step = {"step": 0}
    dcp.load(step, storage_reader=StorageReader(place))
    assert step == {"step": 7}
    assert name in call("restore", place, tmp_path / "out", code=2).stderr
    assert not mark.exists()


def test_a_bomb_in_place_of_a_tensor_does_not_go_off(place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    stream = io.BytesIO()
    torch.save(Bomb("posix.system", mark), stream)
    with (place / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (info,) = (each for index, each in metadata.storage_data.items() if index.fqn == "model.w")
    info.relative_path, info.offset, info.length = "bomb", 0, len(stream.getvalue())
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    (place / "bomb").write_bytes(stream.getvalue())
    with pytest.raises(CorruptError, match=r"posix\.system, which is refused"):
        load(place)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_file_outside_the_place_is_not_read(place: Path, path: str) -> None:
    with (place / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = path
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ResilientError):
        load(place)


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02cbuiltins\nset\n}\x8c\x01ax\x85b.",  # BUILD on a maker
        b"c__builtin__\nset\nc__builtin__\nrange\n(I0\nI9999999999\ntR\x85R.",  # a set that no memory can hold
        b"c__builtin__\nint\n.",  # a type
        b"",
        b".",
        b"\x80\x09.",
    ],
)
def test_no_opcode_reaches_anything(program: bytes) -> None:
    with pytest.raises((Refused, CorruptError)):
        unpickle_value(program, "a value")


def test_what_a_defaultdict_makes_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, {"state": (defaultdict(list, a=[1]),)})
    rest: dict[str, Any] = {"state": None}
    resilient.load(tmp_path, {"state_dict": rest})
    assert rest == {"state": ({"a": [1]},)}
    shutil.rmtree(tmp_path)
