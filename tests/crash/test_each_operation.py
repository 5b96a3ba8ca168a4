"""Whatever operation of the store fails, and however: nothing torn is seen, nothing reported is lost, saving goes on.

Over saves, overlapping saves, retention, restores, copies and adoptions; on memory, a local disk, fsspec and S3. The
small run tries a few points of each, ``--full`` all of them.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from resilient.store.base import Store
from resilient.store.fsspec_store import FsspecStore
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.testing import Fault, fail_each_operation
from resilient.testing.nth import FAULTS
from tests.crash.scenarios import SCENARIOS
from tests.figures import Figures
from tests.s3_server import S3Server


class Stores:
    """Makes empty places of one kind, and removes each when the next one is asked for."""

    def __init__(self, kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
        self._kind = kind
        self._folder = folder
        self._request = request

    def __call__(self) -> Store:
        match self._kind:
            case "memory":
                return MemoryStore()
            case "local":
                shutil.rmtree(self._folder / "run", ignore_errors=True)
                return LocalStore(self._folder / "run")
            case "fsspec":
                filesystem = MemoryFileSystem()
                filesystem.store.clear()
                return FsspecStore(filesystem, f"/{secrets.token_hex(8)}/run")
            case _:
                server: S3Server = self._request.getfixturevalue("s3_server")
                return open_store(server.fresh_url(), storage_options=server.options())


FAULTS_SMALL = {"memory": 5, "local": 2, "fsspec": 2, "S3": 1}
"""The small run tries so many faults, at one operation each; other ones in each scenario."""


def chosen(operation: str, small: int) -> tuple[Sequence[Fault], int | None]:
    """Return the faults to try, and how many points of each; 0: all."""
    if not small:
        return FAULTS, None
    start = list(SCENARIOS).index(operation) * small
    return [FAULTS[(start + number) % len(FAULTS)] for number in range(small)], 1


@pytest.mark.proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", FAULTS_SMALL)
@pytest.mark.parametrize("operation", SCENARIOS)
def test_whatever_fails_nothing_is_torn_or_lost(
    operation: str,
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    rounds = figures("each-operation", "The N-th operation of a store fails, for every N: points tried")
    name = f"{operation}, on {kind}"
    if any(name in line for line in rounds):
        return  # done before this proof was interrupted
    make = Stores(kind, tmp_path, request)
    faults, most = chosen(operation, count(FAULTS_SMALL[kind], 0))
    points = fail_each_operation(make, SCENARIOS[operation](), faults=faults, most=most)
    assert sum(points.values()) >= 1
    print(name, points)
    rounds.add(**{name: sum(points.values())})
