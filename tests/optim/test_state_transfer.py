"""An optimizer takes over the state of the same parameter and class, by name; the rest begins anew and is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer.optim.groups import grouped, optimizer_of, rates
from trainer.optim.sparse import DenseAndSparse, SparseRule, sparse_optimizer
from trainer.optim.state_loading import saved_keys, state_keys
from trainer.optim.state_transfer import StateKeys, StateTransfer, plan_transfer
from trainer.optim.states import by_name, of_no_parameter
from trainer.optim.updater import Updater, UpdaterState

LAYERS = 4


class Layers(nn.Module):
    """Layers of one size: state of one fits any other, so that a mix-up raises nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))


def updater(model: nn.Module, name: str, factors: dict[str, float] | None = None, **node: Any) -> Updater:
    call = {"_target_": f"torch.optim.{name}", "lr": 0.1, "weight_decay": 0.0, **node}
    found = rates(model, {**call, "lr_factors": factors or {}})
    groups = grouped([(n, p) for n, p in model.named_parameters() if found[n].lr], found)
    names = {id(p): n for n, p in model.named_parameters()}
    return Updater(optimizer_of(call, groups), lambda step: 1.0, names=[names[id(p)] for _, ps in groups for p in ps])


def trained(name: str, factors: dict[str, float] | None = None, **node: Any) -> tuple[nn.Module, Updater]:
    """After two updates in which the gradient of each parameter is another number."""
    torch.manual_seed(0)
    model = Layers()
    made = updater(model, name, factors, **node)
    for _ in range(2):
        for number, p in enumerate(model.parameters(), 1):
            p.grad = torch.full_like(p, float(number))
        made.step()
    return model, made


def states(made: Updater) -> dict[str, dict[str, float]]:
    """Of each parameter, the first element of each thing that is remembered."""
    parts = made.optimizer.parts.values() if isinstance(made.optimizer, DenseAndSparse) else [made.optimizer]
    kept = {p: state for part in parts for p, state in part.state.items()}
    found = {n: kept.get(p, {}) for n, p in zip(made.names, made.parameters, strict=True)}
    return {
        n: {k: float(torch.as_tensor(v).flatten()[0]) for k, v in one.items() if v is not None}
        for n, one in found.items()
    }


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_groups_of_parameters_keep_each_ones_own_state(name: str) -> None:
    """Two groups become two others, three and one: the state of l.N stays that of l.N."""
    node, cls = OPTIMIZERS[name], getattr(torch.optim, name)
    model = Layers()
    by_id = {id(p): n for n, p in model.named_parameters()}

    def grouped_as(*groups: list[int]) -> Updater:
        wanted = [[p for n, p in model.named_parameters() if int(n.split(".")[1]) in g] for g in groups]
        optimizer = cls([{"params": ps} for ps in wanted], lr=0.1, **node)
        return Updater(optimizer, lambda step: 1.0, names=[by_id[id(p)] for ps in wanted for p in ps])

    first = grouped_as([0, 1], [2, 3])
    for _ in range(2):
        for number, p in enumerate(model.parameters(), 1):
            p.grad = torch.full_like(p, float(number))
        first.step()
    before = states(first)
    assert len({tuple(sorted(one.items())) for one in before.values()}) > 1, "they can be told apart"
    for groups in ([[0, 2], [1, 3]], [[3], [2, 0], [1]], [[3, 2, 1, 0]]):
        second = grouped_as(*groups)
        second.load(**first.state())
        assert states(second) == before


def test_frozen_parameters_lose_their_state_and_thawed_ones_begin_anew() -> None:
    model, first = trained("Adam", {"l.0": 0})
    second = updater(model, "Adam", {"l.3": 0})
    second.load(**first.state())
    before, after = states(first), states(second)
    assert all(after[n] == before[n] for n in after if n.split(".")[1] in "12")
    assert not any(after[f"l.0.{part}"] for part in ("weight", "bias"))
    lines = list(carried(first, second).lines(second.names))
    assert (
        "exp_avg, exp_avg_sq and step of l.0.weight and l.0.bias: begins anew, because the checkpoint has none" in lines
    )
    assert "the optimizer's state of l.3.weight and l.3.bias, which is not trained any more" in lines


def test_adagrad_whose_state_is_there_before_the_first_update_begins_anew_too() -> None:
    model, first = trained("Adagrad", {"l.0": 0}, initial_accumulator_value=0.5)
    second = updater(model, "Adagrad", {}, initial_accumulator_value=0.5)
    second.load(**first.state())
    assert states(second) == {
        **states(first),
        **{f"l.0.{part}": {"step": 0.0, "sum": 0.5} for part in ("weight", "bias")},
    }
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    second.step()


def carried(first: Updater, second: Updater) -> StateTransfer:
    keys = {n: list(one) for n, one in states(first).items()}
    return plan_transfer(StateKeys(type(first.optimizer).__name__, keys), state_keys(second.optimizer, second.names))


def test_weight_decay_splits_the_groups_and_momentum_stays() -> None:
    model, first = trained("SGD", momentum=0.9)
    second = updater(model, "SGD", momentum=0.9, weight_decay=1e-4)
    assert len(second.optimizer.param_groups) == 2
    second.load(**first.state())
    assert states(second) == states(first)
    assert list(carried(first, second).lines(second.names)) == []
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [1e-4, 0.0]


@pytest.mark.parametrize(
    ("name", "before", "now", "added"),
    [
        ("SGD", {}, {"momentum": 0.9}, "momentum_buffer"),
        ("SGD", {}, {"momentum": 0.9, "nesterov": True}, "momentum_buffer"),
        ("Adam", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("AdamW", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {}, {"centered": True}, "grad_avg"),
        ("RMSprop", {}, {"momentum": 0.9}, "momentum_buffer"),
        ("RMSprop", {"momentum": 0.9}, {"centered": True, "momentum": 0.9}, "grad_avg"),
    ],
)
def test_option_that_needs_a_buffer_begins_it_as_torch_does_and_keeps_the_rest(
    name: str, before: dict[str, Any], now: dict[str, Any], added: str
) -> None:
    """And the other way round: what is not needed any more is dropped."""
    model, first = trained(name, **before)
    second = updater(model, name, **now)
    second.load(**first.state())
    for n, one in states(second).items():
        assert {k: v for k, v in one.items() if k != added} == states(first)[n]
        assert one.get(added, 0.0) == 0.0
    said = list(carried(first, second).lines(second.names))
    assert said == [f"{added} of all 8 parameters: begins anew, because the checkpoint has none"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    second.step()
    assert all(added in one for one in states(second).values())
    third = updater(model, name, **before)
    third.load(**second.state())
    assert all(added not in one for one in states(third).values())
    assert list(carried(second, third).lines(third.names)) == [
        f"{added} of all 8 parameters, which the optimizer does not need now"
    ]


@pytest.mark.parametrize(
    ("before", "now"), [("SGD", "RMSprop"), ("RMSprop", "Adadelta"), ("Adam", "AdamW"), ("Adam", "SGD")]
)
def test_another_optimizer_takes_over_nothing(before: str, now: str) -> None:
    """Also where what it remembers has the same name: the momentum of RMSprop is of steps, that of SGD of gradients."""
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}
    model, first = trained(before, **options.get(before, {}))
    second = updater(model, now, **options.get(now, {}))
    second.load(**first.state())
    assert not any(states(second).values())
    assert all(f"the checkpoint is of {before}" in line for line in carried(first, second).lines(second.names))


def test_two_optimizers_of_a_model_with_tables_are_told_apart() -> None:
    """The pair has one class, whatever the two are: Adam's averages once were taken for Adagrad's sums."""
    table, weight = nn.Embedding(3, 2, sparse=True), nn.Parameter(torch.zeros(2))

    def pair(dense: type[torch.optim.Optimizer], rule: str) -> Updater:
        sparse = SparseRule(rule, 0.1, {})
        made = DenseAndSparse(dense([weight], lr=0.1), sparse_optimizer(sparse, [table.weight]), sparse)
        return Updater(made, lambda step: 1.0, names=["dense", "table.weight"])

    first = pair(torch.optim.Adam, "adam")
    (weight.sum() + table(torch.tensor([1])).sum()).backward()
    first.step()
    assert first.state()["kind"] == "Adam + SparseAdam"
    same, other, half = (
        pair(torch.optim.Adam, "adam"),
        pair(torch.optim.Adagrad, "adagrad"),
        pair(torch.optim.AdamW, "adam"),
    )
    for one in (same, other, half):
        one.load(**first.state())
    assert set(states(same)["table.weight"]) == {"step", "exp_avg", "exp_avg_sq"} == set(states(same)["dense"])
    assert states(half) == {**states(same), "dense": {}}
    assert states(other) == states(pair(torch.optim.Adagrad, "adagrad"))


def test_parameter_without_a_gradient_so_far_is_nothing_that_is_lost() -> None:
    saved = StateKeys("Adam", {"a": ["step", "exp_avg"], "b": []})
    live = StateKeys("Adam", {"a": {"step", "exp_avg"}, "b": {"step", "exp_avg"}})
    assert list(plan_transfer(saved, live).lines(live.keys)) == []


def test_optimizer_of_somebodys_own_that_cannot_be_tried_goes_on_by_name() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("wants a closure")

    weight = nn.Parameter(torch.zeros(2))
    made = Own([weight], lr=0.1)
    assert state_keys(made, ["w"]) == StateKeys("Own", {"w": None}) and not made.state
    saved = StateKeys("Own", {"w": ["anything"]})
    assert plan_transfer(saved, StateKeys("Own", {"w": None})).keys == {"w": ["anything"]}


def test_settings_that_the_optimizer_has_changed_itself_go_on_with_their_parameters() -> None:
    """As optimizers without a schedule do (``k`` in ScheduleFree); and the config's own changes count."""
    model = Layers()
    first = updater(model, "SGD", {"l.0": 0.5}, momentum=0.9)
    first.optimizer.param_groups[0]["dampening"], first.optimizer.param_groups[1]["dampening"] = 0.25, 0.5
    second = updater(model, "SGD", {"l.0": 0.5, "l.1": 0.1}, momentum=0.8)
    second.load(**first.state())
    assert [g["dampening"] for g in second.optimizer.param_groups] == [0.25, 0.5, 0.5]
    assert {g["momentum"] for g in second.optimizer.param_groups} == {0.8}


class Counts(torch.optim.SGD):
    """Counts its steps in each of the places that an optimizer of one's own may use beside a parameter's state."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.state["global"]["n"] = self.count  # type: ignore[index]
        for group in self.param_groups:
            group["k"] = self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.count = own.pop("count")
        super().load_state_dict(own)


class Nested(Counts):
    """Its ``state_dict`` has none of torch's keys, as that of a wrapper; and its ``state`` cannot be set."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": torch.optim.SGD.state_dict(self), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict["base"], "count": state_dict["count"]})


def stepped(made: Updater, steps: int = 3) -> Updater:
    for _ in range(steps):
        for p in made.parameters:
            p.grad = torch.ones_like(p)
        made.step()
    return made


def counting(cls: type[Counts], *names: str, dampening: float = 0.0) -> Updater:
    ps = [nn.Parameter(torch.ones(2)) for _ in names]
    return Updater(cls(ps, lr=0.1, momentum=0.9, dampening=dampening), lambda step: 1.0, names=names)


@pytest.mark.parametrize("cls", [Counts, Nested])
def test_what_an_optimizer_of_ones_own_keeps_of_no_parameter_goes_on(cls: type[Counts]) -> None:
    first = stepped(counting(cls, "a", "b"))
    second = counting(cls, "a", "b", dampening=0.5)
    second.load(**first.state())
    own = second.optimizer
    assert isinstance(own, cls)
    assert own.param_groups[0]["dampening"] == 0.5, "the config's own changes count"
    assert (own.count, own.state["global"], own.param_groups[0]["k"]) == (3, {"n": 3}, 3)  # type: ignore[index]
    assert all(float(own.state[p]["momentum_buffer"][0]) > 2 for p in second.parameters)
    assert stepped(second, 1).optimizer.param_groups[0]["k"] == 4


def test_what_is_of_no_parameter_begins_anew_with_other_parameters_and_is_said() -> None:
    first, second = stepped(counting(Counts, "a", "b")), counting(Counts, "b", "c")
    second.load(**first.state())
    own = second.optimizer
    assert isinstance(own, Counts)
    assert (own.count, "global" in own.state, "k" in own.param_groups[0]) == (0, False, False)
    assert "momentum_buffer" in own.state[second.parameters[0]], "that of b is mapped by its name"
    saved = UpdaterState(**first.state())
    others = of_no_parameter(saved.optimizer, saved.made_with)
    states_of_it = by_name(saved.optimizer, saved.names)
    before, now = saved_keys(saved.kind, states_of_it, (), others), StateKeys("SGD", {"a": [], "b": []})
    lines = list(plan_transfer(before, now).lines("ab"))
    assert (
        "count, global and k of its groups of the optimizer as a whole, because its class or its parameters "
        "have changed"
    ) in lines


def test_setting_that_is_changed_in_place_is_not_taken_for_the_configs() -> None:
    first, second = (updater(Layers(), "SGD") for _ in range(2))
    for one in (first, second):
        one.optimizer.param_groups[0]["seen"] = [0]
        one.made_with = one._settings()
    first.optimizer.param_groups[0]["seen"].append(1)
    second.load(**first.state())
    assert second.optimizer.param_groups[0]["seen"] == [0, 1]
