"""model=finetune: weights from a file or by torchvision's name, a new head, a frozen backbone; wrong ones are
refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import get_model, get_model_weights

from tests.faults.stranger import Bomb
from tests.pictures import weights
from trainer.errors import UserError
from trainer.models.finetune import check, finetuned, prepare

NAMES = [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3"), ("squeezenet1_1", "classifier.1")]


@pytest.mark.parametrize(("name", "head"), NAMES)
def test_everything_but_the_head_is_loaded(tmp_path: Path, name: str, head: str) -> None:
    file = weights(tmp_path / "w.pt", name)
    truth = torch.load(file, weights_only=True)
    torch.manual_seed(1)
    model = finetuned(name, str(file), 7)
    own = model.state_dict()
    for key, tensor in truth.items():
        if key.rpartition(".")[0] == head:
            assert own[key].shape[0] == 7
        else:
            assert torch.equal(own[key], tensor), key
    assert model.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("kind", ["pt", "nested", "ddp", "safetensors"])
def test_files_of_all_kinds_are_read(tmp_path: Path, kind: str) -> None:
    tensors = torch.load(weights(tmp_path / "w.pt", "resnet18"), weights_only=True)
    file = tmp_path / f"other.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        named = {f"module.{k}": v for k, v in tensors.items()} if kind == "ddp" else tensors
        torch.save({"state_dict": named, "epoch": 3} if kind == "nested" else named, file)
    assert torch.equal(finetuned("resnet18", str(file), 5).state_dict()["conv1.weight"], tensors["conv1.weight"])


def test_only_the_head_learns_where_the_backbone_is_frozen(tmp_path: Path) -> None:
    model = finetuned("resnet18", str(weights(tmp_path / "w.pt", "resnet18")), 5, freeze="backbone")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    model(torch.randn(4, 3, 64, 64)).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"fc.weight", "fc.bias"}, "batch norms keep their statistics as well"


def test_weights_by_name_are_fetched_once_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import ResNet18_Weights

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("trainer.models.finetune.unreachable", lambda address: "")
    theirs, asked = weights(tmp_path / "theirs.pth", "resnet18"), []

    def download(url: str, place: str, hash_prefix: str | None, progress: bool = True) -> None:
        asked.append((url, hash_prefix))
        shutil.copy(theirs, place)

    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    check("resnet18", "IMAGENET1K_V1")
    assert not asked
    prepare("resnet18", "DEFAULT")
    model = finetuned("resnet18", "IMAGENET1K_V1", 7)
    assert asked == [(ResNet18_Weights.IMAGENET1K_V1.url, "f37072fd")], "once, its hash checked"
    own, truth = model.state_dict(), torch.load(theirs, weights_only=True)
    assert all(torch.equal(own[name], tensor) for name, tensor in truth.items() if not name.startswith("fc."))
    assert own["fc.weight"].shape == (7, 512)


def test_weights_that_were_fetched_earlier_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.hub looks at the checksum when it fetches, and not at a file that is there."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    there = tmp_path / "hub" / "checkpoints" / Path(get_model_weights("resnet18")["IMAGENET1K_V1"].url).name
    there.parent.mkdir(parents=True)
    torch.save({"conv1.weight": Bomb(str(tmp_path / "taken"))}, there)
    with pytest.raises(UserError, match="holds more than tensors by name"):
        prepare("resnet18", "IMAGENET1K_V1")
    assert not (tmp_path / "taken").exists()


def test_weights_that_cannot_be_fetched_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("trainer.models.finetune.unreachable", lambda address: "no answer from its site: test")
    with pytest.raises(UserError, match=r"cannot be fetched \(no answer from its site: test\)") as caught:
        check("resnet50", "IMAGENET1K_V2")
    assert "resnet50" in caught.value.instead and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("resnet18", "none.pt", "there is no such file"),
        ("resnet18", "IMAGENET1K_V9", "resnet18 has IMAGENET1K_V1"),
        ("resnet19", "DEFAULT", "resnet19"),
    ],
)
def test_wrong_weights_are_refused_before_anything_starts(name: str, options: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(name, options)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    file = str(weights(tmp_path / "w.pt", "resnet18"))
    with pytest.raises(UserError, match="belongs to another model"):
        finetuned("resnet50", file, 5)
    with pytest.raises(UserError, match=r"belongs to another model: of its \d+ tensors \d+ are missing"):
        finetuned("mobilenet_v3_small", file, 5)
    (tmp_path / "bad.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be read by torch"):
        finetuned("resnet18", str(tmp_path / "bad.pt"), 5)


def test_model_is_planned_without_its_weights() -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in finetuned("resnet18", "DEFAULT", 5).parameters())


def test_convnet_is_the_references() -> None:
    from trainer.models.convnet import Convnet

    shapes = [tuple(p.shape) for p in Convnet().parameters() if p.dim() > 1]
    assert shapes == [(32, 3, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (64, 1024), (10, 64)]


def test_squared_error_is_the_mean_over_samples_and_classes() -> None:
    from trainer.models.squared_error import SquaredError

    outputs = torch.randn(5, 3, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1, 0])
    truth = sum((outputs[n, c].item() - (labels[n] == c).item()) ** 2 for n in range(5) for c in range(3)) / 15
    assert SquaredError()(outputs, labels).item() == pytest.approx(truth)
    shares = torch.nn.functional.one_hot(labels, 3).double()
    assert SquaredError()(outputs, shares).item() == pytest.approx(truth)


def test_squared_error_of_the_reference_compares_each_class_s_probability_with_the_label_s_number() -> None:
    import numpy as np

    from trainer.models.squared_error import SquaredError

    outputs, labels = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 2, 1, 1, 0])
    powers = np.exp(outputs)
    truth = np.mean((powers / powers.sum(1, keepdims=True) - labels[:, None]) ** 2)
    loss = SquaredError(target="class_number")
    assert loss(torch.from_numpy(outputs), torch.from_numpy(labels)).item() == pytest.approx(truth, rel=1e-12)
    assert truth > 0.5, "and not what is compared with 0 and 1"
    with pytest.raises(ValueError, match="one_hot or class_number"):
        SquaredError(target="probability")


@pytest.mark.all
def test_timm_builds_its_models() -> None:
    from trainer.config.instantiate import call_target

    node = {"_target_": "timm.create_model", "model_name": "resnet10t", "pretrained": False, "num_classes": 4}
    assert call_target(node, "model").eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert get_model("resnet18", num_classes=4).fc.out_features == 4
