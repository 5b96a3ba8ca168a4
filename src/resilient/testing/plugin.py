"""The pytest plugin: fixtures with faults, and a seed that a failed test prints.

It is there wherever this package is installed. Nothing happens to a test that asks for none of it, and nothing of the
package is imported before one does.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from resilient.store.base import Store
    from resilient.store.memory import MemoryStore
    from resilient.testing.faulty_store import Fault, FaultyStore
    from resilient.testing.processes import ProcessFaults

pytest.register_assert_rewrite("resilient.testing.conformance")

_FIXTURE = "resilient_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("resilient").addoption(
        "--resilient-seed",
        type=int,
        metavar="N",
        help="the seed that the fixture resilient_seed derives each test's own from (default: another one each time)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "resilient_seed(n): the seed that the fixture resilient_seed gives this test")
    if config.option.resilient_seed is None:
        told = getattr(config, "workerinput", {})  # by the process of pytest-xdist that started this one, see below
        config.option.resilient_seed = told.get(_FIXTURE, secrets.randbelow(1 << 32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_FIXTURE] = node.config.option.resilient_seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"resilient: --resilient-seed {config.option.resilient_seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _FIXTURE in getattr(item, "fixturenames", ()):
        again = item.config.option.resilient_seed
        report.sections.append(
            ("resilient", f"seed {_seed_of(item)} ({call.when}); again with --resilient-seed {again}")
        )
    return report


def _seed_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker(_FIXTURE)
    if marker is not None:
        return int(marker.args[0])
    # Of each test its own, whichever others run and in which order.
    return zlib.crc32(f"{item.config.option.resilient_seed}:{item.nodeid}".encode())


@pytest.fixture
def resilient_seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, for ``random.Random``; printed if it fails, the same under ``--resilient-seed N``."""
    return _seed_of(request.node)


@pytest.fixture
def memory_store() -> MemoryStore:
    """An empty store in the memory of this process."""
    from resilient.store.memory import MemoryStore  # noqa: PLC0415 -- suites that want no store import nothing

    return MemoryStore()


@pytest.fixture
def faulty_store() -> Iterator[Callable[..., FaultyStore]]:
    """Return ``faulty_store(*faults, inner=None)``: a `FaultyStore`, in memory if no other is given.

    What hangs in one is let go when the test ends.
    """
    from resilient.store.memory import MemoryStore  # noqa: PLC0415 -- as above
    from resilient.testing.faulty_store import FaultyStore  # noqa: PLC0415 -- as above

    made: list[FaultyStore] = []

    def make(*faults: Fault, inner: Store | None = None, **others: Any) -> FaultyStore:
        made.append(FaultyStore(MemoryStore() if inner is None else inner, *faults, **others))
        return made[-1]

    yield make
    for store in made:
        store.heal()


@pytest.fixture
def process_faults() -> Iterator[ProcessFaults]:
    """Return a `ProcessFaults`: what it has stopped goes on when the test ends."""
    from resilient.testing.processes import ProcessFaults  # noqa: PLC0415 -- as above

    with ProcessFaults() as faults:
        yield faults
