"""G2, never a wrong byte: every kind of damage to every file of a checkpoint is noticed before a tensor is touched."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import resilient
from resilient.cli.main import main as cli
from resilient.engine.peers import Peers
from resilient.engine.restore import restore
from resilient.errors import CorruptError
from resilient.events import Bus, Event, FellBack, Notice
from resilient.store.open import open_store
from tests.figures import Figures

OLD, NEW = 1, 2
UNTOUCHED = -7.0


def items(value: float) -> dict[str, dict[str, object]]:
    generator = torch.Generator().manual_seed(int(value * 10) + 100)
    return {
        "model": {"w": torch.randn(300, 41, generator=generator), "b": torch.full((7,), value, dtype=torch.bfloat16)},
        "rest": {"lr": value, "t": torch.tensor(value, dtype=torch.float64)},
    }


def blank() -> dict[str, dict[str, object]]:
    made = items(0.0)
    for item in made.values():
        for leaf in item.values():
            if isinstance(leaf, torch.Tensor):
                leaf.fill_(UNTOUCHED)
    return made


def equal(a: dict[str, dict[str, object]], b: dict[str, dict[str, object]]) -> bool:
    def same(x: object, y: object) -> bool:
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y

    return all(same(a[item][name], b[item][name]) for item in a for name in a[item])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two committed steps."""
    run = tmp_path_factory.mktemp("sound") / "run"
    for step in (OLD, NEW):
        resilient.save(run, step, items(float(step))).wait(60)
    return run


def files_of(run: Path, step: int) -> list[Path]:
    """Return all files of one checkpoint: data, receipt, manifest, COMMIT."""
    every = sorted(path for path in run.rglob("*") if path.is_file())
    return [path for path in every if f"{step:012d}" in str(path.relative_to(run)) and ".tmp-" not in path.name]


def automatic(run: Path) -> tuple[int, dict[str, dict[str, object]], list[Event]]:
    into, bus = blank(), Bus()
    events: list[Event] = []
    bus.subscribe(events.append)
    found = restore(open_store(run), into, Peers.current(), resume="auto", bus=bus)
    assert found is not None
    return found.commit.step, into, events


def check_noticed(run: Path, victim: Path) -> str:
    """Damage is reported by name; a restore returns no wrong byte, and falls back unless it does not need the file."""
    verified = CliRunner().invoke(cli, ["verify", str(run), "--deep", "--json"])
    name = str(victim.relative_to(run))
    report = json.loads(verified.stdout)
    if victim.name == "COMMIT" and not victim.exists():
        assert report["ok"], "without its COMMIT the step is one that was never committed"
    else:
        assert verified.exit_code == 12, f"{name}: not noticed"
        assert any(name == bad["object"] for bad in report["bad"]), f"{name} is not named in {report['bad']}"
    step, into, events = automatic(run)
    assert equal(into, items(float(step)))
    if "/receipts/" in name:
        assert step == NEW, "a committed step no longer needs its receipts"
        return "not needed"
    assert step == OLD
    if victim.exists() or victim.name != "COMMIT":
        said = [event for event in events if isinstance(event, FellBack | Notice)]
        assert any(name in str(event) for event in said), f"{name} is not named as the reason to fall back: {said}"
        refused = CliRunner().invoke(cli, ["restore", f"{run}@{NEW}", f"{run}-never"])
        assert refused.exit_code == 12, refused.output
        with pytest.raises(CorruptError):
            resilient.load(run, blank(), step=NEW)
    return "fell back"


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_flipped_byte_is_noticed(
    sound: Path, tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("flipped-bytes", "One byte flipped in one file of a checkpoint")
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    victims = files_of(run, NEW)
    for number in range(len(rounds), count(24, 200)):
        victim = victims[number % len(victims)]
        content = bytearray(victim.read_bytes())
        at, mask = rng.randrange(len(content)), rng.randrange(1, 256)
        content[at] ^= mask
        victim.write_bytes(content)
        rounds.add(file=victim.parent.name + "/" + victim.name, byte=at, mask=mask, outcome=check_noticed(run, victim))
        content[at] ^= mask
        victim.write_bytes(content)
    assert automatic(run)[0] == NEW


@pytest.mark.field_report("BR-231")
@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed"])
def test_every_object_that_is_cut_or_lost_is_noticed(sound: Path, tmp_path: Path, damage: str) -> None:
    for number, name in enumerate(path.relative_to(sound) for path in files_of(sound, NEW)):
        run = tmp_path / str(number)
        shutil.copytree(sound, run)
        victim = run / name
        content = victim.read_bytes()
        if damage == "removed":
            victim.unlink()
        else:
            victim.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
        check_noticed(run, victim)


@pytest.mark.parametrize("document", ["run.json", "generations/00000001.json", "generations/00000001.base.json"])
def test_damage_to_the_documents_is_noticed_and_loses_nothing(sound: Path, tmp_path: Path, document: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    content = bytearray((run / document).read_bytes())
    content[len(content) // 2] ^= 1
    (run / document).write_bytes(content)
    verified = CliRunner().invoke(cli, ["verify", str(run), "--json"])
    assert verified.exit_code == 12
    assert document in verified.output
    if document != "run.json":
        step, into, _ = automatic(run)
        assert step == NEW
        assert equal(into, items(float(NEW)))


def test_a_pickle_bomb_in_any_file_does_not_go_off(sound: Path, tmp_path: Path) -> None:
    fuse = tmp_path / "went-off"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (fuse,))

    bomb = pickle.dumps(Bomb())
    run = tmp_path / "run"
    for name in [path.relative_to(sound) for path in sound.rglob("*") if path.is_file()]:
        shutil.copytree(sound, run)
        (run / name).write_bytes(bomb)
        for arguments in (["ls", str(run)], ["show", str(run)], ["verify", str(run), "--deep"]):
            CliRunner().invoke(cli, arguments)
        with contextlib.suppress(resilient.ResilientError):
            resilient.load(run, blank())
        shutil.rmtree(run)
    assert not fuse.exists()
