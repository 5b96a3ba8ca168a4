"""Full tensors as safetensors files, read back by the library of that format."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from resilient.catalog.contents import read_manifest
from resilient.catalog.export import export_safetensors
from resilient.catalog.line import read_line
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError, UsageError
from resilient.format.documents import Manifest
from resilient.store.memory import MemoryStore
from tests.catalog.runs import ReceiptMaker, attempt_of, commit_of, new_generation, save, tensors_of


def a_manifest(*, world_size: int = 3) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    save(store, new_generation(store), 4, world_size=world_size)
    return store, read_manifest(store, read_line(store).commits[0])


def test_full_tensors_come_back_by_their_names(tmp_path: Path) -> None:
    store, manifest = a_manifest()
    seen: list[tuple[int, int]] = []
    files = export_safetensors(store, manifest, tmp_path / "out", progress=lambda *pair: seen.append(pair))
    assert sorted(path.name for path in files) == ["model.safetensors", "rng.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "rng.safetensors"]
    model = load_file(tmp_path / "out" / "model.safetensors")
    wanted = tensors_of(4)
    assert sorted(model) == ["b", "tied", "w"]
    assert np.array_equal(model["w"], wanted["w"])
    assert np.array_equal(model["b"], wanted["b"])
    assert np.array_equal(model["tied"], wanted["b"])
    rng = load_file(tmp_path / "out" / "rng.safetensors")
    assert {name: list(tensor) for name, tensor in rng.items()} == {
        f"rank{rank}.state": [40 + rank] * 2 for rank in range(3)
    }
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.field_report("BR-091")
def test_every_shape_and_alignment_comes_back(tmp_path: Path) -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    tensors = {
        "odd": np.arange(3, dtype=np.uint8),
        "flags": np.array([[True, False, True]]),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "half": np.arange(5, dtype=np.float16),
        "big": np.arange(7, dtype=np.int64),
        "complex": np.array([1 + 2j], dtype=np.complex64),
        "ünï": np.ones(1, dtype=np.float32),
    }
    maker = ReceiptMaker(attempt)
    for name, tensor in tensors.items():
        maker.tensor(name, tensor)
    maker.write(store)
    commit_of(store, attempt, world_size=1)
    export_safetensors(store, read_manifest(store, read_line(store).commits[0]), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert np.array_equal(found[name], tensor), name
        assert found[name].shape == tensor.shape


def test_only_the_items_that_were_asked_for(tmp_path: Path) -> None:
    store, manifest = a_manifest()
    (file,) = export_safetensors(store, manifest, tmp_path, items=["rng"])
    assert file.name == "rng.safetensors"
    with pytest.raises(NotFoundError, match="'nothing'"):
        export_safetensors(store, manifest, tmp_path, items=["nothing"])


def test_names_of_items_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    ReceiptMaker(attempt).tensor("w", np.ones(1), item="../../up").write(store)
    commit_of(store, attempt, world_size=1)
    (file,) = export_safetensors(store, read_manifest(store, read_line(store).commits[0]), tmp_path / "out")
    assert file.parent == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_wrong_byte_leaves_no_file(tmp_path: Path) -> None:
    store, manifest = a_manifest()
    key = manifest.objects[-1].key
    store.put(key, [bytes(store.size(key))])
    with pytest.raises(CorruptError, match=key):
        export_safetensors(store, manifest, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_and_dtypes_without_a_name_are_refused(tmp_path: Path) -> None:
    store, manifest = a_manifest()
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError) as caught:
        export_safetensors(store, manifest, tmp_path)
    assert caught.value.kind is ErrorKind.DESTINATION_NOT_EMPTY
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    strange = tuple(msgspec.structs.replace(tensor, dtype="float8_e4m3fnuz") for tensor in manifest.tensors)
    with pytest.raises(UsageError, match=r"model\.w \(float8_e4m3fnuz\)"):
        export_safetensors(store, msgspec.structs.replace(manifest, tensors=strange), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    store, manifest = a_manifest()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        export_safetensors(store, manifest, tmp_path / "file" / "out")
