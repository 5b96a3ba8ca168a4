"""README's example code runs, and its commands exist.

A block below ``<!-- run: name -->`` is a complete program; the others only have to compile. Commands run in the place
that the programs made, in the order of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import resilient

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = [(found["mark"], found["code"]) for found in BLOCK.finditer(README)]
PROGRAMS = {mark.removeprefix("run: "): code for mark, code in BLOCKS if mark}
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("resilient ")
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENT_")}
    done = subprocess.run(
        command, cwd=folder, env=environ | environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def write(folder: Path, name: str) -> str:
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(PROGRAMS[name])
    return str(path)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_every_block_compiles_and_uses_names_that_are_there() -> None:
    assert len(BLOCKS) >= 5
    for _, code in BLOCKS:
        compile(code, "README.md", "exec")
        for name in re.findall(r"\bresilient\.(\w+)", code):
            assert name in resilient.__all__


def test_the_script_before_is_a_script(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    run([sys.executable, write(tmp_path, "before")], tmp_path, **environment)


def test_the_first_hour(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*torchrun, write(tmp_path, "after")], tmp_path)
    assert run([sys.executable, write(tmp_path, "notebook")], tmp_path).startswith("120 ")
    local = [command for command in COMMANDS if "s3://" not in command]
    assert len(local) >= 5
    for command in local:
        run([str(Path(sys.executable).with_name("resilient")), *shlex.split(command)[1:]], tmp_path)
    assert list((tmp_path / "out").glob("*.safetensors"))


def test_by_hand(tmp_path: Path) -> None:
    run([sys.executable, write(tmp_path, "by hand")], tmp_path)
