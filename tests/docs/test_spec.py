"""docs/spec/format.md says what the code does: fields in order, dtypes, extension codes, layout."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import msgspec
import pytest

from resilient.catalog import marks
from resilient.catalog.beat import Sign
from resilient.clock import SYSTEM_CLOCK
from resilient.format import chunks, columns, documents, hangs, layout, manifests, receipts, values
from resilient.format.dtypes import ITEMSIZE
from resilient.store.memory import MemoryStore

SPEC = (Path(__file__).parents[2] / "docs/spec/format.md").read_text()
BINARY: dict[str, type[msgspec.Struct]] = {
    "Receipt": receipts.PackedReceipt,
    "Structure": receipts.Structure,
    "Slot": receipts.Slot,
    "Table": columns.Table,
    "Chunk": chunks.Chunk,
    "Manifest": manifests.StoredIndex,
    "Pages": manifests.Pages,
    "Item": documents.Item,
    "Tensor": documents.Tensor,
    "Object": documents.Object,
    "Value": documents.Value,
    "The first encoding": documents.Receipt,
}


def table_after(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading."""
    _, found, rest = SPEC.partition(f"\n{heading}\n")
    assert found, f"the specification has no {heading!r}"
    lines = rest.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("heading", BINARY)
def test_binary_documents_have_these_fields_in_this_order(heading: str) -> None:
    assert [row[0] for row in table_after(f"### {heading}")] == list(BINARY[heading].__struct_fields__)


@pytest.mark.parametrize("kind", documents._NAMES, ids=lambda kind: str(documents._NAMES[kind]))
def test_json_documents_have_these_members(kind: type) -> None:
    fields = [field.name for field in dataclasses.fields(kind)]
    assert [row[0] for row in table_after(f"### {documents._NAMES[kind]}")] == fields


def test_signs_of_life_have_these_members() -> None:
    assert [row[0] for row in table_after("### Signs of life")] == [field.name for field in dataclasses.fields(Sign)]


def test_hangs_have_these_members() -> None:
    assert [row[0] for row in table_after("### Hangs")] == list(hangs.Hang.__struct_fields__)


def test_marks_have_these_members() -> None:
    store, attempt = MemoryStore(), layout.Attempt(step=1, generation=1, nonce="0123456789abcdef")
    marks.write_mark(store, attempt, marks.PINNED, by=marks.USER, why="", clock=SYSTEM_CLOCK)
    members = json.loads(store.get(attempt.mark("pinned", "user")))
    assert members["kind"] == "mark"
    assert {row[0] for row in table_after("### Marks")} == members.keys() - {"format", "kind", "digest"}


def test_dtypes_have_these_sizes() -> None:
    assert {row[0]: int(row[1]) for row in table_after("## 8. Tensor data")} == dict(ITEMSIZE)


def test_extension_codes_are_these() -> None:
    codes = {int(row[0]) for row in table_after("## 9. Values")}
    constants = {
        value for name, value in vars(values).items() if re.fullmatch("_[A-Z]+", name) and isinstance(value, int)
    }
    assert codes == constants


@pytest.mark.parametrize(
    ("value", "code"),
    [((1,), 1), ({1}, 2), (frozenset({1}), 3), (2**64, 4), (1j, 5), ({1: 2}, 6), (range(3), 12)],
)
def test_an_encoded_value_carries_its_code(value: object, code: int) -> None:
    encoded = msgspec.msgpack.decode(values.encode(value))
    assert isinstance(encoded, msgspec.msgpack.Ext)
    assert encoded.code == code


def test_keys_look_like_this() -> None:
    attempt = layout.Attempt(step=12000, generation=7, nonce="0123456789abcdef")
    hashed = ((3 * 0x9E3779B1) >> 12) & 0xFF
    assert attempt.receipt(3) == "steps/000000012000/g00000007-0123456789abcdef/receipts/000003"
    assert attempt.manifest("ff") == "steps/000000012000/g00000007-0123456789abcdef/manifest-ff"
    assert attempt.data(3, 0) == f"data/{hashed:02x}/g00000007-0123456789abcdef/000000012000-000003-0"
    assert (layout.claim(7), layout.base(7)) == ("generations/00000007.json", "generations/00000007.base.json")
    assert layout.hang(7, 3) == "control/hangs/00000007-000003"
    assert layout.outcome(7) == "generations/00000007.end.json"
