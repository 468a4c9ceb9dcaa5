"""A state comes back from its file as it was, in values, kinds and order in memory; what cannot be held is named; no
file runs code."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.checkpoint.tensor_tree import DEEPEST, KINDS, Packed, outline, read
from trainer.errors import UserError
from trainer.host.sharded import Piece

KIND = st.sampled_from(sorted(KINDS, key=str))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.sampled_from([2**70, -0.0, 1e-320])
)
KEYS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.tuples(st.text(), st.integers()), st.just("__metadata__"), st.binary()
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any kind and shape, 0 axes and 0 elements too, in any order in memory, also a part of a larger one or
    shared."""
    shape = draw(st.lists(st.integers(0, 3), max_size=5))
    size = math.prod(shape) * torch.empty(0, dtype=(kind := draw(KIND))).element_size()
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if kind is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    made = torch.frombuffer(content, dtype=kind).reshape(shape) if size else torch.empty(shape, dtype=kind)
    way = draw(st.sampled_from(["plain", "permuted", "part", "repeated", "grad"]))
    if way == "permuted":
        return made.permute(draw(st.permutations(range(len(shape)))))
    if way == "part" and shape:
        return made[..., ::2]
    if way == "repeated":
        return made.expand(2, *shape)
    return torch.nn.Parameter(made) if way == "grad" and made.is_floating_point() else made


ARRAYS = st.builds(
    lambda kind, shape, order: np.arange(math.prod(shape)).reshape(shape).astype(kind, order),
    st.sampled_from(["<f8", ">f4", "i2", "u4", "?", "c8", ">i8"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
)
STATES = st.recursive(
    st.one_of(PLAIN, tensors(), ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def raw(tensor: torch.Tensor) -> list[int]:
    """Its bytes, in the order of its elements."""
    row = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return row.copy_(tensor.detach().reshape(-1)).view(torch.uint8).tolist()


def steps(tensor: torch.Tensor) -> list[int]:
    """Strides of those axes along which there is something to step over."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype == wanted.dtype and found.shape == wanted.shape
        assert raw(found) == raw(wanted)
        if torch.empty_like(wanted).stride() == wanted.stride():  # it has no gaps and repeats nothing
            assert steps(found) == steps(wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype.newbyteorder("=") and found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert [(type(k), k) for k in found] == [(type(k), k) for k in wanted]
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(wanted) and repr(found) == repr(wanted)  # nan is nan, -0.0 is not 0.0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(STATES)
def test_a_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "state.safetensors"
    Packed(state).write(path)
    assert_same(read(path), state)


def test_images_weights_keep_their_order_in_memory(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    Packed({"bf16": weight.bfloat16(), "fp32": weight}).write(tmp_path / "state")
    found = read(tmp_path / "state")
    assert all(found[name].is_contiguous(memory_format=torch.channels_last) for name in ("bf16", "fp32"))
    assert_same(found, {"bf16": weight.bfloat16(), "fp32": weight})


def test_what_happens_to_the_tensors_afterwards_is_not_in_the_file(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = {"whole": whole, "part": whole[2:], "row": torch.zeros(1).expand(3), "conjugate": torch.ones(2) * 1j}
    state["conjugate"] = state["conjugate"].conj()
    packed = Packed(state)
    whole.zero_()
    packed.write(tmp_path / "state")
    found = read(tmp_path / "state")
    assert found["whole"].tolist() == [0, 1, 2, 3, 4, 5] and found["part"].tolist() == [2, 3, 4, 5]
    assert found["row"].tolist() == [0, 0, 0] and found["conjugate"].tolist() == [-1j, -1j]
    found["row"][0] = 1  # elements of their own again
    assert found["row"].tolist() == [1, 0, 0]


def test_parts_of_a_dict_are_read_alone(tmp_path: Path) -> None:
    Packed({"a": torch.ones(2), "b": [torch.zeros(3)], "c": 1}).write(tmp_path / "state")
    assert_same(read(tmp_path / "state", {"a", "c"}), {"a": torch.ones(2), "c": 1})
    Packed([1]).write(tmp_path / "list")
    with pytest.raises(UserError, match="there is no dict"):
        read(tmp_path / "list", {"a"})


def looped() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


NOT_HELD = {
    "function": ({"a": {"b": [1, print]}}, r"a\.b\.1 is a builtins\.builtin_function_or_method"),
    "set": ({"seen": {1, 2}}, r"seen is a builtins\.set"),
    "sparse": ({"g": torch.eye(2).to_sparse()}, r"g is a tensor without plain values \(sparse_coo"),
    "meta": ([torch.empty(2, device="meta")], r"0 is a tensor without plain values \(meta"),
    "complex128": ([torch.zeros(2, dtype=torch.complex128)], r"0 is a tensor of torch\.complex128"),
    "objects": ({"names": np.array([print])}, r"names is an array of object"),
    "texts": ({"names": np.array(["a"])}, r"names is an array of <U1"),
    "key": ({"a": {frozenset(): 1}}, r"a is a dict with a key of the type frozenset"),
    "tensor as key": ({torch.ones(1): 1}, r"state is a dict with a key of the type Tensor"),
    "loop": (looped(), r"is nested more than 100 deep"),
    "digits": ({"n": 10**5000}, r"n is a number of thousands of digits"),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_a_checkpoint_cannot_hold_is_named(name: str) -> None:
    state, says = NOT_HELD[name]
    with pytest.raises(TypeError, match=f"{says}.*which a checkpoint cannot hold$"):
        Packed(state)


def test_as_deep_as_is_written_is_read(tmp_path: Path) -> None:
    state: Any = 1
    for _ in range(DEEPEST):
        state = [state]
    Packed(state).write(tmp_path / "state")
    assert read(tmp_path / "state") == state


def written_in_pieces(folder: Path, whole: torch.Tensor, cuts: list[int]) -> Path:
    """A tensor whose rows three workers have, and one that the last of them has alone; returns the first one's file."""
    shape, last = tuple(whole.shape), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for worker, piece in enumerate(whole.split(cuts)):
        state = {
            "a": [Piece(piece, (0, 1, 2), shape), worker],
            "b": Piece(last if worker == 2 else None, (2,), (2, 3, 4, 4), (0, 2, 3, 1)),
        }
        packed = Packed({"worker": worker}, pieces=state) if worker else Packed(state)
        packed.write(folder / f"worker-{worker}.safetensors")
    torch.save(last, folder / "last")
    return folder / "worker-0.safetensors"


def test_pieces_in_the_files_of_workers_are_read_as_one_tensor_and_by_rows(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    first = written_in_pieces(tmp_path, whole, [2, 3, 0])
    last = torch.load(tmp_path / "last")
    assert_same(read(first), {"a": [whole, 0], "b": last})
    assert_same(read(tmp_path / "worker-1.safetensors"), {"worker": 1})
    stored = read(first, stored=True)
    assert stored["a"][0].shape == (5, 3) and torch.equal(stored["b"].whole(), last)
    assert steps(stored["b"].whole()) == steps(last)
    for begin, end in itertools.combinations_with_replacement(range(6), 2):
        assert torch.equal(stored["a"][0].rows(begin, end), whole[begin:end])
    assert outline(first, {"a"})["a"][0].shape == (5, 3)
    with safe_open(tmp_path / "worker-1.safetensors", "pt") as file:
        assert {name: file.get_tensor(name).shape for name in file.keys()} == {"a.0|piece": (3, 3)}  # noqa: SIM118


@pytest.mark.parametrize("lacks", ["a file", "a tensor", "rows"])
def test_a_piece_that_is_missing_is_named(lacks: str, tmp_path: Path) -> None:
    first = written_in_pieces(tmp_path, torch.randn(5, 3), [2, 2, 1])
    if lacks == "a file":
        (tmp_path / "worker-1.safetensors").unlink()
    elif lacks == "a tensor":
        Packed({"worker": 1}).write(tmp_path / "worker-1.safetensors")
    else:
        pieces = {"a": [Piece(torch.ones(1, 3), (0, 1, 2), (5, 3))]}
        Packed({"worker": 1}, pieces=pieces).write(tmp_path / "worker-1.safetensors")
    with pytest.raises(UserError, match=r"worker-[01]\.safetensors: it cannot be read as a state \("):
        read(first)


@pytest.mark.parametrize(
    "crafted",
    [
        ["pieces", "t", [0, 0], [4, 2], []],
        ["pieces", "t", [], [2, 2], []],
        ["pieces", "t", ["../state"], [2, 2], []],
        ["pieces", "t", [True], [2, 2], []],
        ["pieces", "t", [0], [4, 1], []],
        ["pieces", "t", [0], [2, 2], [5, 0]],
        ["pieces", "t", [0], 3, []],
        ["list", [["pieces", "t", [0], [2, 2], []]] * 2],
        ["pieces", [], [0], [2, 2], []],
        ["pieces", "t"],
    ],
)
def test_crafted_pieces_are_refused(crafted: Any, tmp_path: Path) -> None:
    path = tmp_path / "worker-0.safetensors"
    save_file({"t": torch.ones(2, 2)}, path, metadata={"tree": json.dumps(["pieces", "t", [0], [2, 2], []])})
    assert torch.equal(read(path), torch.ones(2, 2))
    save_file({"t": torch.ones(2, 2)}, path, metadata={"tree": json.dumps(crafted)})
    with pytest.raises(UserError, match=r"worker-0\.safetensors: it cannot be read as a state \("):
        read(path)


TENSOR = ["tensor", "t"]
CRAFTED: dict[str, str] = {
    "no JSON": "{",
    "empty": "",
    "nested beyond Python's stack": "[" * 100_000 + "]" * 100_000,
    "nested lists": '["list",[' * 500 + "]]" * 500,
    "digits": "1" * 5000,
    "an object": "{}",
    "no kind": "[]",
    "kind alone": '["list"]',
    "an unknown kind": '["os.system", ["true"]]',
    "a kind that is no text": "[[], 1]",
    "a number for a list": '["list", 3]',
    "a text for pairs": '["dict", "abcd"]',
    "pairs of one": '["dict", [["a"]]]',
    "a key that is a list": '["dict", [[["list", []], 1]]]',
    "a key that is a dict": '["dict", [[["dict", []], 1]]]',
    "no hex": '["bytes", "xy"]',
    "bytes of a number": '["bytes", 1]',
    "no such tensor": '["tensor", "gone"]',
    "a tensor without name": '["tensor", null]',
    "an array of bf16": '["array", "half"]',
    "axes beyond": json.dumps([*TENSOR, [0, 5]]),
    "axes twice": json.dumps([*TENSOR, [0, 0]]),
    "axes that are texts": json.dumps([*TENSOR, ["a", "b"]]),
    "axes that are a number": json.dumps([*TENSOR, 1]),
    "axes that are a mapping": json.dumps([*TENSOR, {"0": 1}]),
    "more than axes": json.dumps([*TENSOR, [0, 1], 1]),
    "a tensor a million times": json.dumps(["list", [TENSOR] * 1000]),
    "parts too many": '["list", [], 1]',
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_tree_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    tensors = {"t": torch.ones(2, 2), "half": torch.ones(1, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"tree": CRAFTED[name]})
    with pytest.raises(UserError, match=r"state\.safetensors: it cannot be read as a state \(") as error:
        read(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"{}", b"\x80\x04."])
def test_what_is_no_safetensors_is_refused_with_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(UserError, match="it cannot be read as a state"):
        read(tmp_path / "state")


def test_a_folder_or_nothing_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match="it cannot be read as a state"):
            read(path)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.one_of(
            PLAIN.filter(lambda v: not isinstance(v, bytes)),
            st.sampled_from(["tensor", "array", "bytes", "dict", "list", "tuple", "t", "half"]),
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
        max_leaves=8,
    )
)
def test_any_tree_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "crafted.safetensors"
    save_file(
        {"t": torch.ones(2, 2), "half": torch.ones(1, dtype=torch.bfloat16)}, path, metadata={"tree": json.dumps(tree)}
    )
    try:
        read(path)
    except UserError:
        pass


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("trainer.checkpoint.tensor_tree.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        Packed({"a": torch.zeros(10)}).write(tmp_path / "state")


def test_tensors_begin_where_those_of_torch_begin(tmp_path: Path) -> None:
    """Matrix products may round otherwise elsewhere. In a file a tensor begins after the header, as long as what it
    tells."""
    aligned = 64
    assert torch.empty(6).data_ptr() % aligned == 0
    in_files = set()
    for told in range(0, 2 * aligned, 8):
        Packed({"told": "1" * told, "state": torch.arange(6.0)}).write(tmp_path / "state")
        with safe_open(tmp_path / "state", "pt") as file:
            in_files.add(file.get_tensor("state").data_ptr() % aligned)
        assert read(tmp_path / "state")["state"].data_ptr() % aligned == 0
    assert len(in_files) > 1, "safetensors copies by itself"
