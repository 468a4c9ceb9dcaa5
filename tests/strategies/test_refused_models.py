"""Models and optimizers that servers cannot keep are refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.config.run_config import RunConfig
from trainer.strategies import builtin
from trainer.strategies.builtin import PserverDeclaration

MODES = [
    builtin.PserverSyncDeclaration,
    builtin.PserverAsyncDeclaration,
    builtin.PserverSspDeclaration,
    builtin.PserverGeoDeclaration,
]


def refused(declared: PserverDeclaration, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return [str(error) for error in declared.refuse_model(RunConfig(), model, optimizer)]


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_options_that_need_a_whole_table_are_refused_where_it_is_at_servers(
    kind: type[PserverDeclaration], option: str, value: float | bool, table: type[nn.Module]
) -> None:
    for sparse in (True, False):
        model = nn.Sequential(table(9, 2, sparse=sparse, **{option: value}), nn.Linear(2, 1))
        said = refused(kind(), model, torch.optim.SGD(model.parameters(), lr=0.1))
        why = f"model (0.{option}): strategy={kind().name} has only a batch's rows of table 0 at hand"
        assert [s.partition(". Type")[0] for s in said] == [why] * sparse


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_need_whole_parameters_are_refused_where_servers_have_them(
    kind: type[PserverDeclaration], optimizer: type[torch.optim.Optimizer]
) -> None:
    model = nn.Linear(2, 1)
    said = refused(kind(), model, optimizer(model.parameters()))  # type: ignore[call-arg]
    assert len(said) == (kind is not builtin.PserverGeoDeclaration)
    assert all(f"and {optimizer.__name__} needs them whole" in s for s in said)
