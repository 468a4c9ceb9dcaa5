"""Files of weights from outside: what would take any memory, or does not go into a model, is one sentence with the
file's name."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import UserError
from trainer.models.embedding_tables import RowEmbedding
from trainer.models.finetune import architecture, finetuned
from trainer.weights import fit, tensor_files, torch_files
from trainer.worker.model import save

LARGE = 5 * 2**30


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def a_number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def zipped(pickle: bytes) -> bytes:
    """As torch.save, with this pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def safetensors(header: dict[str, Any], data: bytes = b"") -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def of_kind(kind: str, size: int) -> bytes:
    return safetensors({"weight": {"dtype": kind, "shape": [2, 2], "data_offsets": [0, size]}}, bytes(size))


def many(pickle: bytes, times: int = 2000) -> bytes:
    """A long list of pairs, and a function that is called on it many times."""
    pairs = (
        b"]("
        + b"".join(b"K" + bytes([n % 256]) + b"M" + struct.pack("<H", n) + b"\x86" for n in range(1000))
        + b"eq\x00"
    )
    return b"\x80\x02" + pickle + b"q\x01" + pairs + b"]" + b"h\x01h\x00\x85Ra" * times + b"."


AMPLIFIED = {
    "bytearray": (b"\x80\x02cbuiltins\nbytearray\n" + a_number(LARGE) + b"\x85R.", "calls builtins.bytearray"),
    "storage": (
        b"\x80\x02ctorch.storage\nUntypedStorage\n" + a_number(LARGE) + b"\x85R.",
        "calls torch.storage.UntypedStorage",
    ),
    "a new storage": (
        b"\x80\x02ctorch.storage\nUntypedStorage\n" + a_number(LARGE) + b"\x85\x81.",
        "calls torch.storage.UntypedStorage",
    ),
    "tensor": (b"\x80\x02ctorch\nFloatTensor\n" + a_number(LARGE) + b"\x85R.", "calls torch.FloatTensor"),
    "from the memo": (
        b"\x80\x02cbuiltins\nbytearray\nq\x00h\x00" + a_number(LARGE) + b"\x85R.",
        "calls builtins.bytearray",
    ),
    "quantised": (
        b"\x80\x02ctorch._utils\n_rebuild_qtensor\n" + a_number(LARGE) + b"\x85R.",
        "calls torch._utils._rebuild_qtensor",
    ),
    "any function of any type": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\ncbuiltins\nbytearray\n" + a_number(LARGE) + b"\x86R.",
        "calls torch._tensor._rebuild_from_type_v2",
    ),
    "copies of a text": (
        b"\x80\x02c_codecs\nencode\nq\x01"
        + text(b"a" * 9999)
        + b"q\x00"
        + text(b"latin1")
        + b"q\x02]"
        + b"h\x01h\x00h\x02\x86Ra" * 999
        + b".",
        "copies more than it has",
    ),
    "copies of a mapping": (many(b"ccollections\nOrderedDict\n"), "copies more than it has"),
    "copies of a set": (many(b"cbuiltins\nset\n"), "copies more than it has"),
}


@pytest.mark.parametrize("name", AMPLIFIED)
def test_a_small_file_that_asks_for_much_memory_is_refused_before_torch_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", never)
    content, says = AMPLIFIED[name]
    path = tmp_path / "w.pt"
    for form, expected in ((zipped(content), says), (content, r"the form that torch\.save wrote before torch 1\.6")):
        path.write_bytes(form)
        for read in (tensor_files.read, tensor_files.outlines):
            with pytest.raises(UserError, match=expected) as caught:
                read(path, f"weights={path}")
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_an_archive_has_several_times_is_refused(tmp_path: Path) -> None:
    saved, path = io.BytesIO(), tmp_path / "w.pt"
    torch.save({"weight": torch.zeros(1000)}, saved)
    content = saved.getvalue()
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06") if b"PK\x06\x06" not in content else content.index(b"PK\x06\x06")
    entry = next(
        start + n
        for n in range(end - start)
        if content[start + n : start + n + 4] == b"PK\x01\x02" and b"data/0" in content[start + n : start + n + 80]
    )
    size = 46 + sum(struct.unpack("<3H", content[entry + 28 : entry + 34]))
    extra = content[entry : entry + size] * 20
    tail = bytearray(content[content.index(b"PK\x05\x06") :])
    count, length, _ = struct.unpack("<HII", tail[10:20])
    struct.pack_into("<HHII", tail, 8, count + 20, count + 20, length + len(extra), start)
    path.write_bytes(content[:end] + extra + bytes(tail))
    with pytest.raises(UserError, match=r"weights=w\.pt: "):
        tensor_files.read(path, "weights=w.pt")


def test_checkpoints_of_usual_trainings_are_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 2))
    model.register_buffer("b16", torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("u16", torch.ones(3, dtype=torch.uint16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 3, 6, 4).clone())[..., :1].sum().backward()
    optimizer.step()
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2])
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": steps.state_dict(),
        "epoch": 3,
        "best": 0.5,
        "rng": torch.get_rng_state(),
        "shape": torch.Size((1, 2)),
        "names": {"a", "b"},
        "raw": b"\xff\x00",
        "more": Counter("ab"),
        "device": torch.device("cpu"),
        "type": torch.float32,
        "ordered": OrderedDict(a=1),
        "none": None,
    }
    for kept in (whole, model.state_dict(), {"state_dict": dict(model.named_parameters())}):
        torch.save(kept, tmp_path / "w.pt")
        found = tensor_files.read(tmp_path / "w.pt", "weights=w.pt")
        for name, tensor in found.items():
            assert torch.equal(tensor, model.state_dict()[name])
        assert len(found) >= 6
    many_layers = {f"{n}.weight": torch.nn.Parameter(torch.zeros(1)) for n in range(3000)}
    torch.save(many_layers, tmp_path / "w.pt")
    assert len(tensor_files.read(tmp_path / "w.pt", "weights=w.pt")) == 3000


ODD = {
    "F4.safetensors": (
        of_kind("F4", 2),
        r"weight is of the type (F4|float4_e2m1fn_x2), which no model can take|cannot be read as safetensors",
    ),
    "F6.safetensors": (of_kind("F6_E2M3", 3), r"weight is of the type F6|cannot be read as safetensors"),
    "complex.safetensors": (of_kind("C64", 32), r"complex numbers where the model's are real \(weight\)"),
    "beyond.safetensors": (
        safetensors({"weight": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
        "cannot be read as safetensors",
    ),
    "zero.safetensors": (
        safetensors({"weight": {"dtype": "F32", "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}}),
        "weight is |cannot be read|does not go into",
    ),
    "meta.pt": (
        torch.empty(2, 2, device="meta"),
        r"calls torch\._utils\._rebuild_meta_tensor_no_storage|no plain tensor",
    ),
    "sparse.pt": (torch.eye(2).to_sparse(), r"calls torch\.serialization\._get_layout"),
    "rows.pt": (torch.eye(2).to_sparse_csr(), r"calls torch\.serialization\._get_layout"),
    "quantised.pt": (
        torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.quint8),
        r"calls torch\._utils\._rebuild_qtensor",
    ),
    "complex.pt": (torch.eye(2, dtype=torch.complex64), r"complex numbers where the model's are real"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_tensors_that_no_model_takes_are_one_sentence_that_names_the_file(name: str, tmp_path: Path) -> None:
    content, says = ODD[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save({"weight": content}, path)
    model = torch.nn.Linear(2, 2, bias=False)
    for use in (
        lambda: fit.check(path, model, "m"),
        lambda: fit.load(path, model),
        lambda: fit.load_tensors(model, tensor_files.read(path, f"weights={path}"), f"weights={path}"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            use()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_types_of_real_numbers_become_the_models(tmp_path: Path) -> None:
    for kind, size in (("F8_E4M3", 4), ("BOOL", 4), ("I64", 32), ("BF16", 8), ("F16", 8), ("F64", 32)):
        (tmp_path / "w.safetensors").write_bytes(of_kind(kind, size))
        model = torch.nn.Linear(2, 2, bias=False)
        fit.check(tmp_path / "w.safetensors", model, "m")
        fit.load(tmp_path / "w.safetensors", model)
        assert model.weight.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("kind", ["complex", "meta", "old"])
def test_a_pretrained_model_refuses_them_too(kind: str, tmp_path: Path) -> None:
    state = architecture("squeezenet1_1", "x.pt", num_classes=3).state_dict()
    name = "features.0.bias"
    state[name] = state[name].to("meta") if kind == "meta" else state[name].to(torch.complex64)
    path = tmp_path / "w.pt"
    torch.save(state, path, _use_new_zipfile_serialization=kind != "old")
    says = {"complex": "complex numbers", "meta": "_rebuild_meta_tensor", "old": r"before torch 1\.6"}[kind]
    with pytest.raises(UserError, match=says) as caught:
        finetuned("squeezenet1_1", weights=str(path), num_classes=3)
    assert str(path) in str(caught.value)


def test_a_pickle_is_followed_without_making_anything() -> None:
    with pytest.raises(ValueError, match=r"calls posix\.system"):
        torch_files.simulate(b"\x80\x02cposix\nsystem\n" + text(b"true") + b"\x85R.")


def test_a_table_that_was_left_out_is_told_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = torch.nn.Sequential(RowEmbedding(None, 2), torch.nn.Linear(2, 1))
    model[0].weight = torch.nn.Parameter(torch.empty(0, 2))  # as at a worker of parameter servers
    before = model[0].weight
    save(model, tmp_path / "model.safetensors")
    assert model[0].weight is before
    assert set(tensor_files.read(tmp_path / "model.safetensors", "")) == {"1.weight", "1.bias"}
    whole = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 1))
    kept = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    with pytest.raises(
        UserError, match=r"fit the model \(Sequential\): the run left the table 0\.weight out of it \(strategy"
    ):
        fit.load(tmp_path / "model.safetensors", whole)
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.state_dict().items())
    save(whole, tmp_path / "whole.safetensors")
    assert tensor_files.left_out(tmp_path / "whole.safetensors") == []
