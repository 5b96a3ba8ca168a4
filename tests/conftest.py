"""What all tests share: the size of a proof and where its figures go, a pool of ranks, one thread a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported anywhere: many small processes share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Programs that tests start find `tests.…` by name, not by a working directory that a test may have left elsewhere.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

import pytest

from tests.figures import Figures
from tests.ranks import Ranks

pytest_plugins = ["tests.s3_server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run proofs with their full counts (make proof)")


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """Return ``count(small, full)``: how often a proof repeats, in a quick run and under ``--full``."""
    full: bool = request.config.getoption("--full")
    return lambda small, at_full: at_full if full else small


@pytest.fixture
def figures(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], Figures]:
    """Return ``figures(name, title)``: where a proof writes a line for each round.

    Under ``--full`` they are kept, so that an interrupted ``make proof`` goes on at ``len(figures)``.
    """
    kept = request.config.rootpath / "build" / "proof"
    folder = kept if request.config.getoption("--full") else tmp_path
    return lambda name, title: Figures(folder / f"{name}.jsonl", title)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return ``ranks(size)``: a pool of that many gloo ranks, shared by all tests of this process."""
    pools = Ranks()
    yield pools
    pools.close()
