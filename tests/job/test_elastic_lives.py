"""What a life of a run whose hosts come and go is told to be, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.job.elastic import _described, _of_life
from trainer.job.ready import get_ready
from trainer.launch.lobby import Life


@pytest.mark.parametrize(("hosts", "epoch"), [((0,), 14), ((0, 2), 14), ((0, 1, 2), 15)])
def test_updates_that_are_not_those_of_all_hosts_are_told(tmp_path: Path, hosts: tuple[int, ...], epoch: int) -> None:
    """1,438 samples in updates of 96: three workers pad the 15th, and others leave it out."""
    typed = [
        "+recipe=digits_lenet",
        "epochs=2",
        "launch.nnodes=1:3",
        "launch.master_addr=127.0.0.1",
        "launch.node_rank=0",
    ]
    with hydra_app() as app:
        ready = get_ready(commands.plain(compose(app, typed)), commands.typed_keys(typed), str(tmp_path))
    life = Life(2, hosts, tuple("abc"[: len(hosts)]), 29999, "")
    said = _described(life, _of_life(ready, life), ready.plan)
    assert ready.plan.total_steps == 30
    assert (f"; {2 * epoch} updates in total, not 30, and the learning rate" in said) == (epoch != 15)
