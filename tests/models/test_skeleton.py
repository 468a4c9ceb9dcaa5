"""A model of one's own with pretrained weights is built once in a training; what comes after begins with its
skeleton."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from torch import nn

from tests.runs import read, trainer
from trainer.cli import saved_run
from trainer.config.instantiate import needs_skeleton
from trainer.models import skeleton

OWN = """
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        start = torch.load(HERE / "pretrained.pt")
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
        with torch.no_grad():
            self.layers[1].weight.copy_(start["weight"])
        self.register_buffer("shift", start["shift"], persistent=False)

    def forward(self, images):
        return self.layers(images) + self.shift


class Deletes:
    def on_train_start(self, context):
        (HERE / "pretrained.pt").unlink(missing_ok=True)
"""


class Tied(nn.Module):
    """Two layers of one tensor, a buffer that is saved, one that is not, and tensors that only attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.one.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.arange(3.0), persistent=False)
        self.plain, self.listed, self.name = torch.ones(2), [self.two.bias], "as built"


def test_a_skeleton_is_the_module_without_the_values_in_its_state_dict() -> None:
    module = Tied()
    content = skeleton.skeleton(module)
    assert content is not None
    found: Any = skeleton.built(content)
    assert found.one.weight is found.two.weight and found.listed[0] is found.two.bias and found.name == "as built"
    assert not found.one.weight.requires_grad and found.two.bias.requires_grad
    assert torch.equal(found.kept, module.kept) and torch.equal(found.plain, module.plain)  # type: ignore[arg-type]
    assert not any(tensor.any() for tensor in found.state_dict().values())
    found.load_state_dict(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    large = skeleton.skeleton(nn.Linear(4096, 4096))
    assert large is not None and len(large) < 4096, "no weights in it"


def test_what_pickle_does_not_take_and_what_holds_a_secret_has_no_skeleton() -> None:
    keeps = Tied()
    keeps.name = "hub-c4nary"
    assert skeleton.skeleton(keeps) is not None and skeleton.skeleton(keeps, {"c4nary"}) is None
    module = nn.Linear(2, 2)
    module.activation = lambda x: x  # type: ignore[assignment]
    assert skeleton.skeleton(module) is None
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    again = skeleton.built(skeleton.skeleton(meta) or b"")
    assert again.weight.is_meta  # type: ignore[union-attr]


@pytest.mark.parametrize("other", ["group", "others", "owner", "link"])
def test_a_skeleton_that_another_user_may_have_written_is_not_unpickled(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is of the file that is read: what had the name before and what has it later do not matter."""
    path, asked = tmp_path / skeleton.SKELETON, saved_run.Words("eval", "RUN", "", [])
    path.write_bytes(skeleton.skeleton(Tied()) or b"")
    path.chmod(0o600)
    model = {"_target_": "mine.Net"}
    assert saved_run._as_built(model, tmp_path, asked)["_target_"] == saved_run.AS_BUILT
    assert skeleton.of_run(tmp_path) == path.read_bytes() and isinstance(skeleton.as_built(str(path)), Tied)
    if other == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif other == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    else:
        path.chmod(0o620 if other == "group" else 0o602)
    assert saved_run._as_built(model, tmp_path, asked) == model and skeleton.of_run(tmp_path) is None
    with pytest.raises(OSError):
        skeleton.as_built(str(path))


def test_models_that_are_built_without_fetching_need_none() -> None:
    for target in ("torchvision.models.resnet18", "trainer.models.finetune.finetuned", "trainer.models.lenet.LeNet"):
        assert not needs_skeleton({"_target_": target})
    assert needs_skeleton({"_target_": f"{__name__}.Tied"}) and needs_skeleton({"_target_": "torch.hub.load"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers whose pretrained file is gone before the first update; it is logged, tested and kept."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_net.py").write_text(OWN)
    torch.manual_seed(5)
    torch.save({"weight": torch.randn(10, 64), "shift": torch.randn(10)}, folder / "pretrained.pt")
    model = [
        "model._target_=own_net.Net",
        "~model.image_size",
        "~model.in_channels",
        "callbacks=[{_target_: own_net.Deletes}]",
    ]
    done = trainer(
        "+recipe=digits_lenet",
        *model,
        *"""
            data.test_fraction=0.1 epochs=1 limit_train_batches=9 launch.nproc=2 checkpoint.every_epochs=1
            hydra.run.dir=run
        """.split(),
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "pretrained.pt").exists()
    return folder


def by_hand(folder: Path, weights: Path, images: np.ndarray) -> np.ndarray:
    """What these weights give. The shift is drawn again as it was, for its file is gone."""
    torch.manual_seed(5)
    torch.randn(10, 64)
    shift, spec, found = torch.randn(10), read(folder / "run" / "model.json"), load_file(weights)
    placed = (torch.from_numpy(images) - spec["mean"][0]) / spec["std"][0]
    return (placed.flatten(1) @ found["layers.1.weight"].T + found["layers.1.bias"] + shift).numpy()


@pytest.mark.all
def test_its_logged_model_needs_neither_the_file_nor_the_class_to_run_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [model] = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_logged_models(["1"])
    assert model.status == "READY"
    tested = {
        name: value
        for name, value in read(folder / "run" / "result.json")["metrics"].items()
        if name.startswith("test/")
    }
    assert {m.key: m.value for m in model.metrics if m.key.startswith("test/")} == tested and "test/acc1" in tested
    images = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    found = mlflow.pyfunc.load_model(model.artifact_location).predict(images)
    expected = by_hand(folder, folder / "run/checkpoints/best.safetensors", images)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_eval_of_the_run_does_not_build_the_class_again(folder: Path) -> None:
    done = trainer("eval", "run", "tracking=none", "hydra.run.dir=eval", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = read(folder / "run" / "result.json")["metrics"]
    found = read(folder / "eval" / "result.json")["metrics"]
    assert found["val/acc1"] == trained["val/acc1"] and found["val/loss"] == pytest.approx(
        trained["val/loss"], rel=1e-5
    )
    changed = trainer("eval", "run", "model.num_classes=11", "tracking=none", "hydra.run.dir=other", cwd=folder)
    assert changed.returncode == 2 and "pretrained.pt" in changed.stderr, "another model is built, and its file is gone"


def test_the_best_model_is_tested_and_a_checkpoint_exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "test/acc1" in read(folder / "run" / "result.json")["metrics"]
    monkeypatch.syspath_prepend(str(folder))
    from trainer.checkpoint_tools.export import exported

    [checkpoint] = (folder / "run" / "checkpoints").glob("step-*")
    exported(checkpoint, folder / "out.safetensors", "safetensors", averaged=False)
    out, last = load_file(folder / "out.safetensors"), load_file(folder / "run" / "model.safetensors")
    assert out.keys() == last.keys() and all(torch.equal(out[name], last[name]) for name in last)
