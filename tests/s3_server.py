"""A real S3 server (SeaweedFS) on this machine, shared by all processes of one test run.

The first process that wants it starts a keeper, which starts the server. Every user holds a shared lock on a file; the
keeper waits for an exclusive one, and so learns from the kernel that the last user is gone, however it died. Then it
stops the server and removes its data. `python -m tests.s3_server FOLDER` is the keeper.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 90.0
BUCKET = "tests"

# Name, and what it may do.
_IDENTITIES = {
    "owner": ["Admin", "Read", "Write", "List", "Tagging"],
    "reader": ["Read", "List"],
    "blind": ["Read", "Write"],
    "guest": [f"{action}:{BUCKET}/guest*" for action in ("Read", "Write", "List")],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """Where the server is. Each user ``name`` has the key ``name-key`` and the secret ``name-secret``."""

    endpoint: str

    def options(self, user: str = "owner") -> dict[str, Any]:
        """Return the ``storage_options`` for one of the users.

        They are owner, reader (no writing), blind (no listing), and guest (everything, below `guest_url`).
        """
        return {"endpoint_url": self.endpoint, "key": f"{user}-key", "secret": f"{user}-secret"}

    def environment(self, user: str = "owner") -> dict[str, str]:
        """Return the same as environment variables, for other processes."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": f"{user}-key",
            "AWS_SECRET_ACCESS_KEY": f"{user}-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def guest_url(self) -> str:
        return f"s3://{BUCKET}/guest"

    def fresh_url(self) -> str:
        """Return a place where nothing is."""
        return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return the server of this test run, with an empty bucket ``tests``."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with running_server(shared / "s3-server") as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a fresh ``s3://`` place, with endpoint and credentials in the environment."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.fresh_url()


@contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """Use the server of ``folder``, starting it if nobody does."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_locked(folder / "users", fcntl.LOCK_SH))
        with _locked(folder / "starting", fcntl.LOCK_EX):
            address = folder / "address.json"
            if not address.exists():
                _start_keeper(folder, address)
        yield S3Server(**json.loads(address.read_text()))


def _start_keeper(folder: Path, address: Path) -> None:
    with (folder / "keeper.log").open("ab") as log:
        command = [sys.executable, "-m", "tests.s3_server", str(folder)]
        root = Path(__file__).parent.parent
        keeper = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    end = time.monotonic() + START_TIMEOUT_S
    while not address.exists():
        if keeper.poll() is not None or time.monotonic() > end:
            keeper.kill()
            keeper.wait()
            raise RuntimeError(
                f"no S3 server within {START_TIMEOUT_S:g} s:\n{(folder / 'keeper.log').read_text()[-3000:]}"
            )
        time.sleep(0.05)
    # Not waited for here: it ends after all of its users, this process included.
    keeper.returncode = 0


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(file, mode)
        yield
    finally:
        os.close(file)


def keep(folder: Path) -> None:
    """Run the server until nobody uses it any more."""
    address = folder / "address.json"
    server, found = _start_server(folder)
    try:
        address.with_suffix(".new").write_text(json.dumps(asdict(found)))
        address.with_suffix(".new").replace(address)
        with _locked(folder / "users", fcntl.LOCK_EX):
            address.unlink()  # under the lock: whoever comes now starts another server
    finally:
        _stop(server)
        shutil.rmtree(folder / "data", ignore_errors=True)


def _start_server(folder: Path) -> tuple[subprocess.Popen[bytes], S3Server]:
    for _ in range(4):  # a port that was free may be taken before the server has it
        ports = _free_ports(8)
        server = _spawn(folder, ports)
        found = S3Server(endpoint=f"http://127.0.0.1:{ports[3]}")
        try:
            _wait_until_healthy(server, found)
        except RuntimeError as error:
            print(error, flush=True)
            _stop(server)
        else:
            return server, found
    raise RuntimeError("the S3 server does not start")


def _spawn(folder: Path, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": [_identity(*each) for each in _IDENTITIES.items()]}))
    master, volume, filer, s3, *grpc = ports
    command = [
        str(Path(sys.executable).with_name("weed")),
        f"-logdir={data}",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        f"-master.port={master}",
        f"-master.port.grpc={grpc[0]}",
        "-master.volumeSizeLimitMB=1024",
        "-master.volumePreallocate=false",
        f"-volume.port={volume}",
        f"-volume.port.grpc={grpc[1]}",
        "-volume.max=64",
        "-volume.minFreeSpace=1GiB",
        f"-filer.port={filer}",
        f"-filer.port.grpc={grpc[2]}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={grpc[3]}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
    ]
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent)  # noqa: PLW1509 -- the keeper has one thread


def _identity(name: str, actions: Sequence[str]) -> dict[str, Any]:
    credentials = [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret"}]
    return {"name": name, "credentials": credentials, "actions": list(actions)}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: no server is left behind, even if the keeper is killed


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait_until_healthy(server: subprocess.Popen[bytes], found: S3Server) -> None:
    end = time.monotonic() + START_TIMEOUT_S / 2
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{found.endpoint}/healthz", timeout=2):
            return _make_bucket(found)
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server at {found.endpoint} is not healthy (exit code {server.poll()})")


def _make_bucket(found: S3Server) -> None:
    from s3fs import S3FileSystem

    S3FileSystem(**found.options(), skip_instance_cache=True).call_s3("create_bucket", Bucket=BUCKET)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.kill()  # asked politely it takes many seconds, and nobody wants its data any more
    server.wait()


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
