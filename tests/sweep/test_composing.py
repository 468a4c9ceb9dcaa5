"""The jobs of a sweep share what Hydra merges of files, and each has the config that it would have alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.cli import compose
from trainer.cli.sweep_composing import compose_sweep

BASE = "+recipe=digits_lenet"
JOBS = [
    ["optimizer.lr=1"],
    ["optimizer.lr=2", "seed=3"],
    ["optimizer=adam"],
    ["~optimizer.weight_decay"],
    ["optimizer=sgd", "++model.depth=3"],
    ["optimizer={lr: 3}"],
    ["hydra.searchpath=[file://OWN]", "optimizer=own"],
    ["hydra.searchpath=[file://OWN/other]", "optimizer=own"],
    ["optimizer.lr=1"],
]


@pytest.mark.all
@pytest.mark.parametrize("last", [None, "optimizer.lr=2"])
def test_a_job_of_a_sweep_has_the_config_that_it_would_have_alone(tmp_path: Path, last: str | None) -> None:
    for folder, rate in ((tmp_path, 0.7), (tmp_path / "other", 0.8)):
        (folder / "optimizer").mkdir(parents=True)
        (folder / "optimizer" / "own.yaml").write_text(f"lr: {rate}\n_target_: torch.optim.SGD\n")
    jobs = [[BASE, *(word.replace("OWN", str(tmp_path)) for word in job), *([last] if last else [])] for job in JOBS]

    def composed(app: object, job: list[str]) -> str:
        master = compose_sweep(app, [BASE, "tracking=none", "hydra.sweep.dir=s"], "config")  # type: ignore[arg-type]
        return OmegaConf.to_yaml(app.config_loader.load_sweep_config(master, job))  # type: ignore[attr-defined]

    with compose.hydra_app() as app:
        master = compose_sweep(app, [BASE, "tracking=none", "hydra.sweep.dir=s"], "config")
        together = [OmegaConf.to_yaml(app.config_loader.load_sweep_config(master, job)) for job in jobs]
    for job, config in zip(jobs, together, strict=True):
        with compose.hydra_app() as app:  # Hydra has merged nothing for it
            assert composed(app, job) == config, job
    assert len({*together}) >= (5 if last else 8)
