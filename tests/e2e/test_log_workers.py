"""execution.log_workers=true: each worker's own values beside the mean, on the screen with its rank and in its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import SMALL, points, trainer

LINE = r"^\[worker (\d)\] \[Epoch 0, batch (\d+)\] loss: ([\d.]+), acc1: ([\d.]+)"


@pytest.mark.parametrize("strategy", ["collective", "pserver_async"])
def test_each_workers_values_are_seen_with_its_rank(tmp_path: Path, strategy: str) -> None:
    done = trainer(
        *SMALL,
        "execution.log_workers=true",
        "execution.log_every=4",
        "data.work=static",
        f"strategy={strategy}",
        "launch.workers=2",
        "max_steps=9",
        "validation=false",
        "tracking=none",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(LINE, done.stdout, re.MULTILINE)
    batches = ["0", "4", "8"]
    assert [batch for worker, batch, *_ in found if worker == "0"] == batches
    assert [batch for worker, batch, *_ in found if worker == "1"] == batches
    for worker in "01":
        logged = re.findall(LINE, (tmp_path / f"run/workerlog.{worker}").read_text(), re.MULTILINE)
        assert logged == [line for line in found if line[0] == worker]
    if strategy == "collective":
        losses = points(tmp_path / "run", "train/loss")
        for number, mean in enumerate(losses):
            own = [float(loss) for _, batch, loss, _ in found if batch == batches[number]]
            assert own[0] != own[1] and sum(own) / 2 == pytest.approx(mean, abs=1e-5)
    else:
        assert not re.search(r"^\[Epoch 0, batch", done.stdout, re.MULTILINE)  # a line is a worker's own there
