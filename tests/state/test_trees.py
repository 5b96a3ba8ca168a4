"""Plain nested state: what goes in comes out, bit for bit, and what does not fit is named."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resilient.errors import ErrorKind, UsageError
from resilient.format.dtypes import ITEMSIZE
from resilient.state.capture import capture
from resilient.state.tensors import dtype_of
from resilient.state.trees import build, leaves
from tests.state.tiny_engine import bits, load, names, same, save


class Pair(NamedTuple):
    first: Any
    second: Any


def emptied(node: Any) -> Any:
    """Return a destination of the same structure, with other contents."""
    if isinstance(node, torch.Tensor):
        other = torch.empty_like(node, memory_format=torch.contiguous_format)
        other.reshape(-1).view(torch.uint8).fill_(0x15)
        return other
    if isinstance(node, dict):
        return {key: emptied(child) for key, child in node.items()}
    if isinstance(node, list):
        return [emptied(child) for child in node]
    if isinstance(node, Pair):
        return Pair(*map(emptied, node))
    return tuple(map(emptied, node)) if isinstance(node, tuple) else "another value"


@pytest.mark.parametrize("name", ITEMSIZE)
@pytest.mark.field_report("BR-090", "BR-091", "BR-093")
def test_every_dtype_comes_back_bit_equal(name: str) -> None:
    raw = torch.randint(0, 2 if name == "bool" else 256, (3 * 5 * ITEMSIZE[name],), dtype=torch.uint8)
    tensor = raw.view(dtype_of(name)).reshape(3, 5)
    state = {"whole": tensor, "scalar": tensor[1, 2], "empty": tensor[:0], "odd": tensor.T[1:4:2]}
    into = emptied(state)
    load(save({"state": state}), {"state": into})
    assert same(state, into)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with an offset and steps": lambda: torch.arange(100.0).reshape(10, 10)[7:2:1, 1::3].flip(0)[::2],
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "with a gradient": lambda: nn.Parameter(torch.randn(3)) * 2,
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "signalling nan": lambda: torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.field_report("BR-106")
def test_values_and_shape_of_any_view_are_kept(kind: str) -> None:
    source = VIEWS[kind]()
    saved = save({"state": {"x": source}})
    for into in (torch.zeros_like(source, memory_format=torch.contiguous_format), VIEWS[kind]().detach()):
        state = {"x": into}
        load(saved, {"state": state})
        assert bits(into.resolve_conj().resolve_neg()) == bits(source.resolve_conj().resolve_neg())
        assert state["x"] is into, "the destination was replaced, not filled"


@pytest.mark.field_report("BR-105")
def test_only_the_elements_of_a_view_are_stored() -> None:
    big = torch.randn(1000, 100)
    state = {"row": big[3], "left": big[:5, :60], "right": big[:5, 40:]}
    saved = save({"state": state})
    assert saved.nbytes == 4 * (100 + 300 + 300)
    other = torch.zeros(1000, 100)
    into = {"row": other[3], "left": other[:5, :60], "right": other[:5, 40:]}
    load(saved, {"state": into})
    assert same(state, into)
    assert torch.equal(other[:5], big[:5])
    assert not other[5:].any()


@pytest.mark.field_report("BR-102")
def test_values_are_returned_to_the_callers_structure() -> None:
    state = {
        "epoch": 3,
        "values": {"lr": 0.1, "big": 2**80, "nan": float("nan"), "none": None, "t": (1, "x", b"y"), 7: {1, 2}},
        "mixed": [torch.ones(2), 3, (torch.zeros(1), "q", Pair(torch.ones(3), 4))],
        "torch": [torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cpu", 0)],
        "containers": [OrderedDict(a=1), Counter("aab"), deque([1], maxlen=3), np.float32(2.5), np.arange(3).tolist()],
        5: {(1, 2): torch.ones(1)},
    }
    into = emptied(state)
    values = into["mixed"][2]
    load(save({"state": state}), {"state": into})
    assert same(state, into)
    assert values[1] == "another value", "a tuple was changed in place"
    assert into["mixed"][2][0] is values[0], "a tensor was replaced, not filled"


def test_what_is_captured_is_the_value_of_that_moment() -> None:
    numbers, tensor = [1, 2], torch.zeros(2)
    captured = capture({"state": {"list": numbers, "x": tensor}}, rank=0, world_size=1)
    numbers.append(3)
    assert captured.values[0].value == [1, 2]
    assert captured.locals[0].data_ptr() == tensor.data_ptr(), "the live tensor was copied"


TREES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.sampled_from([torch.ones(2), torch.tensor(7), torch.zeros(0, 3)])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab", min_size=1), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=12,
)


def test_containers_that_the_program_holds_stay_the_objects_that_they_are() -> None:
    state: dict[str, Any] = {
        "history": [1, 2, 3],
        "log": {"loss": [0.5], "count": Counter("aab"), "last": deque([1, 2], maxlen=4)},
        "mixed": {"w": torch.ones(1), "seen": ["x"]},
        "kind": [1],
        "length": deque([1, 2], maxlen=2),
    }
    into: dict[str, Any] = {
        "history": [9],
        "log": {"loss": [], "count": Counter("b"), "last": deque(maxlen=4), "gone": 1},
        "mixed": {"w": torch.zeros(1), "seen": []},
        "kind": (1,),
        "length": deque(maxlen=9),
    }
    log, mixed = into["log"], into["mixed"]
    held = [into["history"], log, log["loss"], log["count"], log["last"], mixed, mixed["seen"]]
    load(save({"state": state}), {"state": into})
    assert same(state, into)
    assert into["length"].maxlen == 2
    log, mixed = into["log"], into["mixed"]
    now = [into["history"], log, log["loss"], log["count"], log["last"], mixed, mixed["seen"]]
    assert all(a is b for a, b in zip(held, now, strict=True)), "a container was replaced, not filled"


def test_one_container_in_two_places_never_gets_the_contents_of_the_other() -> None:
    shared: list[int] = []
    into: dict[str, Any] = {"a": shared, "b": {"c": shared}}
    load(save({"state": {"a": [1], "b": {"c": [2]}}}), {"state": into})
    assert into == {"a": [1], "b": {"c": [2]}}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.text("abc", min_size=1), TREES, max_size=4))
def test_a_structure_is_rebuilt_from_its_leaves_alone(tree: dict[str, Any]) -> None:
    assert same(build((leaf.path, leaf.content) for leaf in leaves(tree)), tree)


@pytest.mark.field_report("BR-217")
def test_all_mismatches_are_in_one_error_and_nothing_was_touched() -> None:
    state = {
        "same": torch.ones(2),
        "wide": torch.ones(4),
        "kind": torch.ones(1),
        "only_saved": [torch.ones(1), 5],
        "v": 1,
    }
    into = {
        "same": torch.zeros(2),
        "wide": torch.zeros(5),
        "kind": 3,
        "only_wanted": torch.zeros(1),
        "v": torch.ones(1),
    }
    before = copy.deepcopy(into)
    with pytest.raises(UsageError) as caught:
        load(save({"m": state}), {"m": into, "absent": {"x": 1}})
    assert caught.value.kind is ErrorKind.MISMATCH
    for text in (
        "m.wide: saved with shape (4,), wanted with shape (5,)",
        "m.kind: saved as a tensor, wanted as a value",
        "m.v: saved as a value, wanted as a tensor",
        "wanted by nothing here: m.only_saved.0",
        "wanted by nothing here: m.only_saved.1",
        "not in the checkpoint: m.only_wanted",
        "not in the checkpoint: absent (the checkpoint has m)",
    ):
        assert text in str(caught.value)
    assert same(into, before)


@pytest.mark.field_report("BR-071", "BR-217")
def test_not_strict_loads_what_both_have_and_says_what_not() -> None:
    into = {"a": torch.zeros(2), "fresh": torch.zeros(1), "n": 0}
    notices = load(save({"m": {"a": torch.ones(2), "old": torch.ones(1), "n": 5}}), {"m": into}, strict=False)
    assert torch.equal(into["a"], torch.ones(2))  # type: ignore[arg-type]
    assert into["n"] == 5
    assert len(notices) == 2
    assert any("m.fresh" in line for line in notices)
    assert any("m.old" in line for line in notices)
    with pytest.raises(UsageError, match="wanted with shape"):
        load(save({"m": {"a": torch.ones(3)}}), {"m": {"a": torch.zeros(2)}}, strict=False)


@pytest.mark.field_report("BR-063")
def test_a_load_that_restored_no_tensor_is_an_error() -> None:
    with pytest.raises(UsageError, match="not one tensor"):
        load(save({"m": {"a": torch.ones(2)}}), {"m": {"b": torch.zeros(2)}}, strict=False)
    with pytest.raises(UsageError, match="nothing was asked"):
        load(save({"m": {"a": torch.ones(2)}}), {})


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.int32, torch.complex64])
@pytest.mark.field_report("BR-087")
def test_nothing_is_cast_silently(wanted: torch.dtype) -> None:
    into = torch.zeros(2, dtype=wanted)
    with pytest.raises(UsageError, match=r"m\.a: saved as float32, wanted as"):
        load(save({"m": {"a": torch.ones(2)}}), {"m": {"a": into}})
    assert not into.any()


class Tagged(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: 0, "function"),
    "generator": (lambda: (i for i in range(2)), "generator"),
    "module": (lambda: nn.Linear(1, 1), "Linear"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "qint8"),
    "subclass": (lambda: torch.ones(2).as_subclass(Tagged), "Tagged"),
    "lazy": (nn.UninitializedParameter, "lazy"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    "deque of tensors": (lambda: deque([torch.ones(1)]), "Tensor"),
    "object array": (lambda: np.array([object()]), "object"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.field_report("BR-089", "BR-104")
def test_what_cannot_be_saved_is_refused_by_path_and_type(kind: str) -> None:
    make, word = REFUSED[kind]
    with pytest.raises(UsageError) as caught:
        capture({"m": {"deep": [1, {"hook": make()}]}}, rank=0, world_size=1)
    assert caught.value.kind is ErrorKind.UNSAVEABLE
    assert "deep.1.hook" in str(caught.value)
    assert word in str(caught.value)


def test_a_structure_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["again"] = tree
    with pytest.raises(UsageError, match=r"a\.again"):
        capture({"m": tree}, rank=0, world_size=1)


@pytest.mark.parametrize("item", [3, [torch.ones(1)], object()])
def test_an_item_that_is_nothing_saveable_is_refused(item: object) -> None:
    with pytest.raises(UsageError, match="an item is a module"):
        capture({"m": item}, rank=0, world_size=1)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        {"a": {0: torch.ones(1), "0": torch.ones(1)}},
        {"a": {"b": torch.ones(1)}, "a.b": 3},
    ],
)
def test_two_leaves_of_one_name_are_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        capture({"m": tree}, rank=0, world_size=1)
    assert caught.value.kind is ErrorKind.NAME_COLLISION


def test_one_tensor_under_two_names_is_stored_once() -> None:
    tensor = torch.randn(4)
    saved = save({"m": {"a": tensor, "b": {"c": tensor}}})
    assert saved.nbytes == 16
    into = {"a": torch.zeros(4), "b": {"c": torch.zeros(4)}}
    load(saved, {"m": into})
    assert same(into, {"a": tensor, "b": {"c": tensor}})


def test_holders_are_known_only_where_there_is_one_rank() -> None:
    tree = {"m": {"a": torch.ones(1), "b": defaultdict(list, x=[torch.ones(1)])}}
    assert {leaf.holders for leaf in capture(tree, rank=0, world_size=1).tensors} == {(0,)}
    assert {leaf.holders for leaf in capture(tree, rank=1, world_size=2).tensors} == {None}
    assert names(capture(tree, rank=0, world_size=1).tensors) == {"a", "b.x.0"}
