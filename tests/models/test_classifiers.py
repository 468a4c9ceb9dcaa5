"""model=torchvision: every classifier of torchvision gives one tensor in training; what gives something else is
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import models

from tests.pictures import weights
from trainer.config.instantiate import call_target, for_saved_weights
from trainer.errors import UserError
from trainer.models.finetune import finetuned

NAMES = models.list_models(module=models)
ON_CPU = [name for name in NAMES if name.startswith("regnet")]
"""They compute with tensors while they are built, which the meta device cannot."""
SMALL = ["regnet_x_400mf", "regnet_y_400mf"]
KINDS = "alexnet convnext_tiny efficientnet_b0 googlenet inception_v3 maxvit_t resnet18 swin_v2_t vit_b_32".split()
"""One of each way to build and to answer; `make test-long` takes all."""
TARGET = "trainer.models.classifiers.classifier"


def cases() -> list[object]:
    names = [name for name in NAMES if name not in ON_CPU or name in SMALL]
    return [name if name in KINDS + SMALL[:1] else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", cases())
def test_every_classifier_gives_scores_in_training(name: str) -> None:
    with torch.device("cpu" if name in ON_CPU else "meta"), torch.no_grad():
        model = call_target({"_target_": TARGET, "name": name, "num_classes": 7}, "model").train()
        outputs = model(torch.zeros(2, 3, 224, 224))
    assert isinstance(outputs, torch.Tensor) and outputs.shape == (2, 7)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_classifiers_are_there_when_they_are_asked_for(name: str) -> None:
    with torch.device("meta"):
        model = call_target({"_target_": TARGET, "name": name, "aux_logits": True}, "model")
        assert len(model.train()(torch.zeros(2, 3, 299, 299))) > 1
        plain = call_target({"_target_": TARGET, "name": name}, "model")
    assert {n.partition(".")[0] for n in set(model.state_dict()) - set(plain.state_dict())} <= {
        "aux1",
        "aux2",
        "AuxLogits",
    }


@pytest.mark.parametrize("name", ["fcn_resnet50", "ssd300_vgg16", "raft_small"])
def test_models_of_other_tasks_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"model\.name={name}: .*not scores"):
        call_target({"_target_": TARGET, "name": name}, "model")


def test_finetuning_takes_torchvisions_file_with_its_auxiliary_classifiers(tmp_path: Path) -> None:
    file = weights(tmp_path / "w.pt", "googlenet")
    truth = torch.load(file, weights_only=True)
    assert any(name.startswith("aux1.") for name in truth)
    model = finetuned("googlenet", str(file), 5)
    assert torch.equal(model.state_dict()["inception3a.branch1.conv.weight"], truth["inception3a.branch1.conv.weight"])
    assert model.train()(torch.zeros(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize(("name", "options"), [("resnet18", "DEFAULT"), ("googlenet", "DEFAULT"), ("googlenet", None)])
def test_saved_weights_need_none_of_torchvisions(name: str, options: str | None) -> None:
    """And inputs are turned for the pretrained ones only, as torchvision does."""
    node = {"_target_": TARGET, "name": name, "weights": options, "num_classes": 1000}
    with torch.device("meta"):
        model = call_target(for_saved_weights(node), "model")
    assert getattr(model, "transform_input", None) == (None if name == "resnet18" else options is not None)
