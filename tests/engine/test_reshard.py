"""G7, any world size and any layout: random trees of tensors, saved on N ranks, restored on M, equal bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from tests.engine.resharding import Layout, Mesh, Spec, load, save
from tests.figures import Figures
from tests.ranks import Ranks

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int64",
    "bool",
    "complex64",
]
MESHES: dict[int, list[Mesh]] = {
    1: [(1,)],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
}
DIMS = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 5, 6, 7, 11])


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, ndim: int) -> Layout:
    dims = st.none() | st.integers(0, ndim - 1) if ndim else st.none()
    return tuple(draw(dims) for _ in mesh)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Spec], Mesh, Mesh]:
    saving = draw(st.sampled_from(MESHES[draw(st.integers(1, 6))]))
    loading = draw(st.sampled_from(MESHES[draw(st.integers(1, 6))]))
    specs = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(DIMS, max_size=3)))
        spec = Spec(
            name=f"t{number}",
            dtype=draw(st.sampled_from(DTYPES)),
            shape=shape,
            seed=draw(st.integers(0, 2**31)),
            transposed=draw(st.booleans()),
            plain=draw(st.integers(0, 3)) == 0,
            saved=draw(layouts(saving, len(shape))),
            loaded=draw(layouts(loading, len(shape))),
        )
        specs.append(spec)
    return specs, saving, loading


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_any_layout_on_any_number_of_ranks_restores_bit_for_bit_on_any_other(
    ranks: Ranks, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("resharding", "Random trees, meshes and placements, saved on N ranks and restored on M")
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")

    @hypothesis_seed(seed)
    @settings(
        max_examples=max(1, count(20, 500) - len(rounds)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: tuple[list[Spec], Mesh, Mesh]) -> None:
        specs, saving, loading = case
        n, m = _size(saving), _size(loading)
        with tempfile.TemporaryDirectory() as folder:
            ranks(n).run(save, folder, specs, saving)
            different = ranks(m).run(load, folder, specs, loading)
        assert different == [[]] * m
        rounds.add(saved_on=str(saving), loaded_on=str(loading), tensors=len(specs))

    check()


def _size(mesh: Mesh) -> int:
    size = 1
    for extent in mesh:
        size *= extent
    return size
