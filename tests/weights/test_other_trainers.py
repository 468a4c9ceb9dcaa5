"""Weights as other trainers leave them: the same tensors are loaded from each, or one sentence has the command that
makes a file of them."""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.faults.stranger import Bomb
from trainer.errors import UserError
from trainer.models.finetune import architecture, check, finetuned
from trainer.weights import fit, tensor_files


class Small(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.fc = nn.Linear(4, classes)


class Hyper(dict):  # type: ignore[type-arg]
    """As trainers keep their arguments: a dict with a class of its own."""


torch.manual_seed(0)
MODEL = Small()
STATE = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
OTHER = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def before(prefix: str, state: dict[str, torch.Tensor] = STATE) -> dict[str, torch.Tensor]:
    return OrderedDict((prefix + name, tensor) for name, tensor in state.items())


def inside(part: str) -> dict[str, torch.Tensor]:
    """Names in which a compiler or a wrapper put a part somewhere."""
    return {".".join([*name.split(".")[:1], part, *name.split(".")[1:]]): tensor for name, tensor in STATE.items()}


READ: dict[str, tuple[Any, str]] = {
    "plain": (STATE, ""),
    "module": (before("module."), "names without module."),
    "compiled": (before("_orig_mod."), ""),
    "compiled and wrapped": (before("module._orig_mod."), "names without module."),
    "wrapped and compiled": (before("_orig_mod.module."), "names without module."),
    "lightning": ({"state_dict": before("model."), "hyper_parameters": Hyper(lr=0.1), "epoch": 3}, "its state_dict"),
    "lightning of a compiled model": ({"state_dict": before("model._orig_mod.")}, "names without model."),
    "lightning with a weighted loss": (
        {"state_dict": {**before("net."), "criterion.weight": torch.ones(5)}},
        "not of the model: criterion.weight",
    ),
    "compiled parts": (inside("_orig_mod"), ""),
    "fsdp": (inside("_fsdp_wrapped_module"), ""),
    "a prefix of one's own": (before("student.backbone."), "names without student.backbone."),
    "averaged by torch": ({**before("module."), "n_averaged": torch.tensor(3)}, "not of the model: n_averaged"),
    "teacher beside it": ({**before("teacher.", OTHER), **before("student.")}, "names without student."),
    "model": (
        {"model": STATE, "optimizer": OPTIMIZER, "args": argparse.Namespace(lr=0.1)},
        "skipped: args (argparse.Namespace)",
    ),
    "model_state_dict": (
        {"epoch": 3, "model_state_dict": STATE, "optimizer_state_dict": OPTIMIZER},
        "its model_state_dict",
    ),
    "timm": (
        {"state_dict": STATE, "state_dict_ema": OTHER, "metric": np.float64(71.2), "optimizer": OPTIMIZER},
        "its state_dict; state_dict_ema is not used",
    ),
    "the average first": ({"ema": OTHER, "model": STATE}, "its model; ema is not used"),
    "the average alone": ({"model_ema": STATE, "epoch": 3}, "its model_ema"),
    "weights": ({"weights": STATE}, "its weights"),
    "net": ({"net": before("module."), "acc": 93.1}, "its net"),
    "a name that nobody knows": ({"generator": STATE, "step": 3}, "its generator"),
    "deeper": ({"state": {"model": STATE, "step": 3}}, "its state.model"),
    "with numbers among the tensors": ({**STATE, "epoch": 3, "arch": "small"}, "no tensors: epoch, arch"),
    "with objects of all kinds": (
        {
            "model": STATE,
            "best": np.zeros(3),
            "path": Path("x"),
            "when": datetime.datetime(2026, 1, 1),
            "more": defaultdict(list, a=[1]),
            "log": Hyper(a=Hyper(b=1)),
        },
        (
            "skipped: best (numpy._core.multiarray._reconstruct), path (pathlib.PosixPath), when "
            "(datetime.datetime), more (collections.defaultdict) and 1 more"
        ),
    ),
    "a tensor of another kind": (
        {"state_dict": before("module."), "best_acc1": torch.tensor(70.0), "optimizer": OPTIMIZER},
        "its state_dict",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_same_tensors_are_loaded_and_what_was_taken_is_said(name: str, tmp_path: Path) -> None:
    content, said = READ[name]
    path = tmp_path / "w.pth.tar"
    torch.save(content, path)
    model = Small()
    with torch.device("meta"):
        noted = fit.check(path, Small(), "Small")
    fit.load(path, model)
    assert all(torch.equal(tensor, STATE[name]) for name, tensor in model.state_dict().items())
    assert (said in noted) if said else not noted


def test_a_file_is_what_its_first_bytes_say(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "named.pth")
    torch.save(STATE, tmp_path / "named.safetensors")
    for path in sorted(tmp_path.iterdir()):
        assert tensor_files.read(path, "").keys() == STATE.keys() == tensor_files.outlines(path, "")[0].keys()


STRAY = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n": (
        "is a pointer of Git LFS, and not the file. Type instead: git lfs pull --include "
    ),
    b"<!DOCTYPE html><html><body>404</body></html>": "is a web page: a download that has failed",
    b"\x89HDF\r\n\x1a\n" + bytes(80): "is HDF5, as Keras writes it, which is not read",
    b"\x1f\x8b\x08" + bytes(80): "is packed by gzip. Type instead: gunzip -c ",
    b"": "is empty",
}


@pytest.mark.parametrize("content", STRAY)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_what_is_often_in_the_place_of_weights_is_named(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        tensor_files.read(tmp_path / name, f"weights={tmp_path / name}")
    assert STRAY[content] in str(refused.value)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Small(), Small()


REFUSED: dict[str, tuple[Any, str]] = {
    "several": ({"generator": STATE, "discriminator": OTHER}, "holds several state_dicts (generator, discriminator)"),
    "twice": (
        {**before("encoder_q."), **before("encoder_p.", OTHER)},
        "holds the model 2 times: names begin with encoder_q., encoder_p.",
    ),
    "no tensors": ({"epoch": 3, "lr": 0.1}, "holds epoch, lr and no state_dict, name -> tensor"),
    "arrays": ({"conv1.weight": np.zeros(3)}, "arrays of numpy"),
    "a function of the system": ({"model": STATE, "x": Bomb("x")}, "which plain tensors do not need"),
    "another model": (
        {"a.weight": torch.zeros(1)},
        "does not fit the model (Small): of its 13 tensors 13 are missing, 1 are unknown to the model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, says = REFUSED[name]
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError) as refused:
        fit.check(tmp_path / "w.pt", Small(), "Small")
    assert says in str(refused.value) and len(getattr(refused.value, "__notes__", ())) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["whole", *(pytest.param(k, marks=pytest.mark.all) for k in ("in a checkpoint", "script", "before 1.6"))]
)
def test_a_saved_model_gets_the_command_that_makes_a_file_of_its_tensors(kind: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it's a $w.pt", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    if kind == "script":
        torch.jit.script(model).save(str(path))
    else:
        content: Any = {"whole": model, "in a checkpoint": {"model": model, "epoch": 3}}.get(kind, model.state_dict())
        torch.save(content, path, _use_new_zipfile_serialization=kind != "before 1.6")
    with pytest.raises(UserError) as refused:
        fit.check(path, model, "m")
    says = {"script": "is a TorchScript program", "before 1.6": "before torch 1.6"}.get(
        kind, "holds a whole model (torch.nn.modules.container.Sequential)"
    )
    assert says in str(refused.value)
    [_, *code] = shlex.split(refused.value.instead)
    subprocess.run([sys.executable, *code], cwd=tmp_path, check=True, capture_output=True)
    fit.check(tmp_path / "weights.pth", model, "m")


def test_a_backbone_without_a_head_is_a_start_for_finetuning(tmp_path: Path) -> None:
    state = architecture("resnet18", "x.pt", 1000).state_dict()
    kept = {f"backbone.{name}": tensor for name, tensor in state.items() if not name.startswith("fc.")}
    torch.save(kept, tmp_path / "w.pt")
    assert check("resnet18", str(tmp_path / "w.pt"), num_classes=7) == "names without backbone.; begins anew: fc"
    model = finetuned("resnet18", str(tmp_path / "w.pt"), 7)
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items() if not name.startswith("fc.")
    )
    with pytest.raises(UserError, match=r"of its 13 tensors 2 are missing"):
        torch.save({name: tensor for name, tensor in STATE.items() if "fc" not in name}, tmp_path / "w.pt")
        fit.check(tmp_path / "w.pt", Small(), "Small")


def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    torch.save(architecture("resnet18", "x.pt", 10).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError) as refused:
        check("mobilenet_v3_small", str(tmp_path / "w.pt"), num_classes=10)
    assert "belongs to another model: of its 244 tensors 244 are missing" in str(refused.value) or "are missing" in str(
        refused.value
    )
    assert [note.split()[0] for note in refused.value.__notes__] == ["missing", "unknown"]
