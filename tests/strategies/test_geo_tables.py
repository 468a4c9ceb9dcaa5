"""Geo with an exchange after every step of SGD is averaging, for rows of tables on servers as for dense parameters."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies import launching
from tests.strategies.clicks import Tabled, clicks
from tests.strategies.launching import Case, hand_over, start
from tests.strategies.test_tables import BASE
from trainer.models.embedding_tables import materialise

EPOCHS, EACH, LR = 8, 4, 0.5


def averaged(workers: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Whole models of torch's own, one for each worker; their average after each update, from which all go on."""
    torch.manual_seed(seed)
    first = Tabled().double()
    materialise(first, seed)
    crew = [copy.deepcopy(first) for _ in range(workers)]
    raw, labels = clicks(workers * EACH, 1)
    inputs = {k: torch.from_numpy(v) for k, v in raw.items()}
    found = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((seed, epoch)).permutation(workers * EACH)
        for rank, model in enumerate(crew):
            mine = order[rank::workers]
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            outputs = model({k: v[mine] for k, v in inputs.items()})
            nn.functional.binary_cross_entropy_with_logits(outputs, torch.from_numpy(labels[mine]).double()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for own in zip(*(model.parameters() for model in crew), strict=True):
                mean = torch.stack([p.detach() for p in own]).mean(0)
                for p in own:
                    p.copy_(mean)
        found.append({n: p.detach().numpy().copy() for n, p in crew[0].named_parameters()})
    return found


@pytest.mark.all
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_geo_with_one_step_averages_the_workers_rows(workers: int, servers: int, tmp_path: Path) -> None:
    options = (
        f"data.train_samples={workers * EACH}",
        f"data.global_batch_size={workers * EACH}",
        "data.work=static",
        f"max_steps={EPOCHS}",
        "optimizer=sgd",
        f"optimizer.lr={LR}",
        "scheduler.warmup_steps=0",
        "scheduler.final=1",
        "strategy.k_steps=1",
        "strategy.overlap=false",
        "strategy.slice_above=4",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launching.SERVERS, workers, servers)
        handed = hand_over("pserver_geo", workers, {"geo": Case("tables_each", options, {"epochs": EPOCHS}, base=BASE)})
    answers = start(handed, tmp_path)["worker"]
    for step, truth in enumerate(averaged(workers, seed=3)):
        for rank in range(workers):
            found = answers[rank]["answers"][0]["after"][step]
            assert found.keys() == truth.keys()
            for name, value in truth.items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10, err_msg=f"{name} after {step}")
