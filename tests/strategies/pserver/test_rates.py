"""Parameters that learn at rates of their own, kept by servers: the same as torch's groups, on any number of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies.pserver.harness import config as payload
from tests.strategies.pserver.states import whole
from trainer.config.schema.strategy import Entry
from trainer.models.embedding_tables import dense_of
from trainer.optim.groups import rates
from trainer.planning.launcher import Assignment
from trainer.strategies.builtin import ELEMENTWISE
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.server.shard import Shard
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.strategies.pserver.worker.initial_values import layouts
from trainer.strategies.pserver.worker.own_share import feedback_in_order
from trainer.strategies.pserver.worker.remote_model import DenseMap
from trainer.strategies.pserver.worker.replica import Replica
from trainer.worker.model import Updaters

OPTIMIZERS = {
    "adamw": {"_target_": "torch.optim.AdamW", "lr": 0.05, "weight_decay": 0.1},
    "momentum": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "asgd": {
        "_target_": "trainer.optim.by_name.by_name",
        "name": "ASGD",
        "lr": 0.05,
        "weight_decay": 0.1,
        "lambd": 0.01,
    },
    "rprop": {"_target_": "trainer.optim.by_name.by_name", "name": "Rprop", "lr": 0.05, "weight_decay": 0.0},
    **{
        name.lower(): {"_target_": "trainer.optim.by_name.by_name", "name": name, "lr": 0.05, "weight_decay": 0.1}
        for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
    },
    "adam": {"_target_": "torch.optim.Adam", "lr": 0.05, "weight_decay": 0.1, "amsgrad": True},
    "adagrad": {"_target_": "torch.optim.Adagrad", "lr": 0.05, "weight_decay": 0.0, "initial_accumulator_value": 0.1},
}
OWN = {"lr_factors": {"0": 0.5, "*.bias": 2.0}, "layer_decay": 0.9, "decay_norms_and_biases": False, "sparse": "auto"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()


def test_every_optimizer_that_servers_take_is_here() -> None:
    assert {o.get("name", o["_target_"].split(".")[-1]) for o in OPTIMIZERS.values()} == set(ELEMENTWISE)


def run(optimizer: str, own: dict[str, Any]) -> dict[str, Any]:
    made = payload("sync", 2)
    made["config"]["optimizer"] = {**OPTIMIZERS[optimizer], **own}
    made["plan"]["batches"]["lr"] = 0.1  # scaled: twice the node's
    return made


class Servers:
    """So many servers' shards, and the map of the model's parameters onto them."""

    def __init__(self, made: dict[str, Any], model: nn.Module, servers: int, slice_above: int | None) -> None:
        found = rates(model, made["config"]["optimizer"])
        self.map = DenseMap(dense_of(model), servers, "round_robin", slice_above, found)
        self.shards = []
        for number, layout in enumerate(layouts(self.map, [], torch.float64, servers)):
            told = Layout.parsed(
                {"dtype": layout.dtype, "pieces": layout.pieces, "tables": [], "groups": layout.groups}
            )
            made["plan"]["topology"]["roles"]["server"] = servers
            given = Assignment.of(made)
            self.shards.append(
                Shard(
                    given.config,
                    Entry(),
                    given.plan,
                    number,
                    told,
                    lambda count, dtype: torch.empty(count, dtype=dtype),
                )
            )
            self.shards[-1].vector.copy_(self.map.values(number))

    def step(self, model: nn.Module) -> None:
        for number, shard in enumerate(self.shards):
            shard.apply(self.map.gradients(number), {}, 0)
            self.map.write(number, shard.vector)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


def saved(shard: Shard) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A server's state, copied."""
    tensors, numbers = shard.state()
    return whole(tensors), numbers


@pytest.mark.parametrize(
    ("servers", "slice_above"),
    [(1, None), (3, 4), *(pytest.param(*other, marks=pytest.mark.long) for other in ((1, 4), (3, None)))],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_servers_update_as_one_process_does_and_go_on_on_another_number_of_them(
    optimizer: str, slice_above: int | None, servers: int
) -> None:
    made = run(optimizer, OWN)
    alone, served = net(), net()
    given = Assignment.of(made)
    updater = Updaters(given.config, given.plan)(alone)
    cluster = Servers(made, served, servers, slice_above)
    for step in range(12):
        if step == 6:
            states = [saved(shard) for shard in cluster.shards]
            cluster = Servers(made, served, 5 - servers, 6)
            for shard in cluster.shards:
                shard.vector.zero_()
                shard.load(states)
        give_gradients(alone, step), give_gradients(served, step)
        updater.step()
        cluster.step(served)
        equal(alone, served)


def test_what_is_saved_of_one_rate_starts_parameters_of_others() -> None:
    made, other = run("adamw", {"sparse": "auto", "decay_norms_and_biases": True}), run("adamw", OWN)
    model = net()
    before = Servers(made, model, 2, None)
    give_gradients(model, 0)
    before.step(model)
    after = Servers(other, model, 1, None)
    [shard] = after.shards
    shard.load([saved(s) for s in before.shards])
    assert len(shard.parts) > 3
    assert [float(shard.optimizer.state[p]["step"]) for p in shard.parts] == [1.0] * len(shard.parts)


def test_groups_that_do_not_fit_the_pieces_are_refused() -> None:
    told = {"dtype": "float64", "pieces": [["a", 0, 4]], "tables": []}
    assert Layout.parsed(told).groups == []
    for groups in ([[3, 1.0, True]], [[0, 1.0, True], [4, 1.0, True]]):
        with pytest.raises(ValueError, match="groups of"):
            Layout.parsed({**told, "groups": groups})


CHANGES = {
    "other factors": ("adamw", {"lr_factors": {"0": 0.5}}, "adamw", {"lr_factors": {"2": 0.1}, "layer_decay": 0.5}),
    "weight decay": ("momentum", {"weight_decay": 0.0}, "momentum", {}),
    "no momentum before": ("momentum", {"momentum": 0.0}, "momentum", {}),
    "no maximum before": ("adam", {"amsgrad": False}, "adam", {}),
    "no maximum now": ("adam", {}, "adam", {"amsgrad": False}),
    "centered": ("rmsprop", {}, "rmsprop", {"centered": True, "momentum": 0.5}),
    "another one": ("momentum", {}, "rmsprop", {"momentum": 0.5}),
    "another one, without momentum": ("rmsprop", {}, "adadelta", {}),
    "another one, with sums": ("adamw", {}, "adagrad", {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_servers_take_over_of_another_optimizer_what_a_worker_takes_over(change: str) -> None:
    before, old, now, new = CHANGES[change]
    first, second = run(before, {**OWN, "lr_factors": {}, **old}), run(now, {**OWN, "lr_factors": {}, **new})
    alone, served = net(), net()
    updaters = Updaters(Assignment.of(first).config, Assignment.of(first).plan)
    updater, cluster = updaters(alone), Servers(first, served, 2, 6)
    for step in range(8):
        if step == 4:
            state = updater.state()
            updater = Updaters(Assignment.of(second).config, Assignment.of(second).plan)(alone)
            updater.load(**state)
            states = [(t, {**n, "optimizer": state["kind"]}) for t, n in map(saved, cluster.shards)]
            cluster = Servers(second, served, 3, 6)
            for shard in cluster.shards:
                shard.load(states)
        give_gradients(alone, step), give_gradients(served, step)
        updater.step()
        cluster.step(served)
        equal(alone, served)


def test_workers_vectors_are_put_in_the_order_of_other_rates() -> None:
    """What a worker of pserver_geo knows of a server's vector, and what rounding has left out, lies in the order of the
    rates."""
    first, second = (
        run("adamw", {"lr_factors": factors, "decay_norms_and_biases": True})
        for factors in ({"*.weight": 0.5}, {"2.*": 0.5})
    )
    model = net()
    before, after = (Servers(made, model, 2, 4).map for made in (first, second))
    vectors = [before.values(server) for server in range(2)]
    wanted = [after.values(server) for server in range(2)]
    assert before.places != after.places and any(not torch.equal(a, b) for a, b in zip(vectors, wanted, strict=True))
    found = after.rearranged(before.places, vectors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    [one, other] = feedback_in_order(after, before.places, [{0: vectors[0]}, {0: vectors[1]}])
    assert torch.equal(one[0], wanted[0]) and torch.equal(other[0], wanted[1])


@pytest.mark.parametrize("now", ["adagrad", "rowwise_adagrad", "adam", "sgd"])
def test_rows_of_another_rule_keep_their_values_alone(now: str) -> None:
    replica, fresh = (Replica(1, torch.float64, kernel(rule), 9) for rule in ("adagrad", now))
    ids = np.array([2, 5])
    replica.insert(ids, torch.ones(2, 1, dtype=torch.float64))
    replica.update(ids, torch.full((2, 1), 3.0, dtype=torch.float64), 0.1)
    fresh.load(**replica.state())
    assert torch.equal(fresh.look_up(ids), replica.look_up(ids))
    own = fresh.rows[fresh.slots(ids)][:, 1 : fresh.width]
    assert torch.equal(own, torch.full_like(own, 9.0 if now == "adagrad" else 0.0))
    assert fresh.steps == (1 if now == "adagrad" else 0)
