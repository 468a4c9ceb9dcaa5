"""Parameter groups: what decays, how fast each parameter learns, and every optimizer of torch by its name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from trainer.errors import UserError
from trainer.optim.by_name import by_name, names
from trainer.optim.groups import Rate, check_patterns, freeze, grouped, optimizer_of, rates, undecayed
from trainer.optim.layers import layer_numbers
from trainer.optim.refused import REFUSED

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.2}


class OwnNorm(nn.LayerNorm):
    """A norm of somebody's own, over two dimensions."""


class Mixed(nn.Module):
    """Norms of all kinds, a bias with two dimensions, a parameter of its own, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.batch = nn.BatchNorm2d(4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.group = nn.GroupNorm(2, 4)
        self.layer = OwnNorm([4, 4])
        self.rms = nn.RMSNorm([4, 4])
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1, 4))})
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def no_weight_decay(self) -> set[str]:
        return {"token"}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.group(self.instance(self.batch(self.stem(images))))
        features = self.rms(self.layer(features)).mean((2, 3))
        return self.second(self.first(features * self.scale + self.shift["bias"]) + self.token[0])


def node(**more: Any) -> dict[str, Any]:
    return {**ADAMW, "decay_norms_and_biases": False, "lr_factors": {}, "layer_decay": None, **more}


def made(model: nn.Module, config: dict[str, Any], lr: float | None = None) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return optimizer_of(config, grouped(trained, rates(model, config)), lr)


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Each parameter's learning rate and decay, as the optimizer has them; each parameter exactly once."""
    by_id = {id(p): n for n, p in model.named_parameters()}
    listed = [(by_id[id(p)], g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]]
    assert len(listed) == len({name for name, _, _ in listed})
    return {name: (lr, decay) for name, lr, decay in listed}


def test_only_weights_that_multiply_decay() -> None:
    model = Mixed()
    decayed = {n for n, (_, decay) in of(model, made(model, node())).items() if decay}
    assert decayed == {"stem.weight", "first.weight"}
    assert set(undecayed(model)) == {n for n, _ in model.named_parameters()} - decayed


def test_all_of_it_decays_when_told() -> None:
    model = Mixed()
    optimizer = made(model, node(decay_norms_and_biases=True))
    assert len(optimizer.param_groups) == 1 and set(of(model, optimizer).values()) == {(0.1, 0.2)}


def test_resnet_spares_its_norms_and_its_bias() -> None:
    model = models.resnet18(num_classes=5)
    spared = {n for n, (_, decay) in of(model, made(model, node())).items() if not decay}
    assert spared == {
        n for n, p in model.named_parameters() if ".bn" in f".{n}" or "downsample.1" in n or n == "fc.bias"
    }


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 5) -> list[torch.Tensor]:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64)
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_groups_train_as_torchs_own_written_by_hand() -> None:
    torch.manual_seed(0)
    ours = Mixed().double()
    theirs = copy.deepcopy(ours)
    config = node(lr_factors={"stem": 0.5, "second.*": 2.0})
    hand = [
        {"params": [theirs.stem.weight], "lr": 0.05, "weight_decay": 0.2},
        {"params": [theirs.stem.bias], "lr": 0.05, "weight_decay": 0.0},
        {"params": [theirs.first.weight], "lr": 0.2, "weight_decay": 0.2},  # shared with second.weight
        {"params": [theirs.second.bias], "lr": 0.2, "weight_decay": 0.0},
        {
            "params": [p for n, p in theirs.named_parameters() if n.split(".")[0] not in ("stem", "first", "second")],
            "lr": 0.1,
            "weight_decay": 0.0,
        },
    ]
    for one, other in zip(steps(ours, made(ours, config)), steps(theirs, torch.optim.AdamW(hand, lr=0.1)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"stem": 0.1}, {"stem.weight": 0.1, "stem.bias": 0.1, "scale": 1.0}),
        ({"*": 0.1, "stem": 1}, {"stem.weight": 1.0, "scale": 0.1, "second.bias": 0.1}),
        ({"stem": 1, "*": 0.1}, {"stem.weight": 0.1}),
        ({"*.weight": 0.5, "stem.w*": 0.25}, {"stem.weight": 0.25, "batch.weight": 0.5, "stem.bias": 1.0}),
        ({"second": 3}, {"first.weight": 3.0, "second.bias": 3.0}),
    ],
)
def test_of_the_patterns_that_match_the_last_counts(factors: dict[str, float], expected: dict[str, float]) -> None:
    found = rates(Mixed(), node(lr_factors=factors))
    assert {name: found[name].lr for name in expected} == expected


def test_factor_zero_freezes() -> None:
    model = Mixed().double()
    before = copy.deepcopy(model.state_dict())
    config = node(lr_factors={"*": 0, "second.bias": 1})
    check_patterns(model, config)
    freeze(model, config)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["second.bias"]
    steps(model, made(model, config))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"second.bias"}


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ({"stemm": 0.1}, r"stemm.*no parameter.*its parts are .*Type instead: 'optimizer.lr_factors={stem: 0.1}"),
        ({"stem": 1, "layr.weight": 2}, r"layr.weight.*Type instead: 'optimizer.lr_factors={layer.weight: 2}"),
        ({"backbone.*": 2}, r"backbone"),
        ({"*": 0}, "freeze all of the model"),
    ],
)
def test_patterns_that_name_nothing_are_refused(factors: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=f"(?s){says}"):
        check_patterns(Mixed(), node(lr_factors=factors))


def test_layers_of_a_resnet_are_its_blocks() -> None:
    model = models.resnet18(num_classes=5)
    numbers = layer_numbers(model)
    blocks = [f"layer{stage}.{block}." for stage in range(1, 5) for block in range(2)]
    for name, _ in model.named_parameters():
        expected = 0 if name.startswith(("conv1", "bn1")) else 9 if name.startswith("fc") else None
        assert numbers[name] == (
            expected if expected is not None else 1 + [name.startswith(b) for b in blocks].index(True)
        )
    found = rates(model, node(layer_decay=0.5))
    assert found["fc.bias"].lr == 1.0 and found["layer4.1.bn2.weight"].lr == 0.5 and found["conv1.weight"].lr == 0.5**9


def beit(name: str, blocks: int) -> int:
    """BEiT's get_num_layer_for_vit, for torchvision's names."""
    if name in ("class_token", "encoder.pos_embedding") or name.startswith("conv_proj"):
        return 0
    if name.startswith("encoder.layers"):
        return int(name.split(".")[2].removeprefix("encoder_layer_")) + 1
    return blocks + 1


def test_layers_of_a_transformer_are_beits() -> None:
    with torch.device("meta"):
        model = models.VisionTransformer(32, 8, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=5)
    assert layer_numbers(model) == {name: beit(name, 3) for name, _ in model.named_parameters()}


def test_layers_of_what_is_wrapped_are_found_inside() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = models.resnet18(num_classes=8)
            self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))

    numbers = layer_numbers(Wrapped())
    assert (numbers["backbone.conv1.weight"], numbers["backbone.layer1.0.bn1.bias"], numbers["backbone.fc.bias"]) == (
        0,
        1,
        9,
    )
    assert numbers["head.0.weight"] == numbers["head.1.weight"] == 10


def test_factors_and_layer_decay_and_the_scaled_rate_multiply() -> None:
    model = models.resnet18(num_classes=5)
    found = of(model, made(model, node(layer_decay=0.5, lr_factors={"layer4": 0.1, "fc": 10}), lr=0.4))
    assert found["fc.weight"] == (pytest.approx(4.0), 0.2)
    assert found["layer4.0.conv1.weight"] == (pytest.approx(0.4 * 0.1 * 0.25), 0.2)
    assert found["layer3.1.bn1.weight"] == (pytest.approx(0.4 * 0.5**3), 0.0)


@pytest.mark.parametrize("name", sorted(names()))
def test_every_optimizer_of_torch_by_its_name_trains_or_says_why_not(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    if name == "muon":
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    config = {
        "_target_": "trainer.optim.by_name.by_name",
        "name": names()[name].__name__,
        "lr": 0.02,
        "weight_decay": 0.0,
    }
    if name in REFUSED:
        with pytest.raises(UserError, match=rf"optimizer\.name={config['name']}.*Type instead: optimizer"):
            made(model, config)
        return
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    optimizer, losses = made(model, {**config, "layer_decay": 0.9}), []
    for _ in range(60):
        loss = (model(inputs)[:, 0] - inputs[:, 0]).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0] or (name in ("adadelta", "asgd") and losses[-1] < losses[0])


def test_a_decay_that_the_class_does_not_know_is_refused_and_none_is_left_out() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    assert isinstance(by_name(parameters, name="Rprop", lr=0.1, weight_decay=0.0), torch.optim.Rprop)
    with pytest.raises(TypeError, match="weight_decay"):
        by_name(parameters, name="Rprop", lr=0.1, weight_decay=0.1)


def test_what_has_no_options_of_its_own_is_one_plain_group() -> None:
    assert grouped([("a", 1), ("b", 2)], {}) == [(Rate(), [1, 2])]
    model = nn.Linear(2, 2)
    assert len(made(model, {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.0}).param_groups) == 1
