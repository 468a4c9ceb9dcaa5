"""A strategy of somebody's own, with a server, passes through the unchanged command line, launcher and loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.runs import trainer
from tests.strategies.launching import VOCABULARY
from trainer import run as run_here
from trainer.errors import UserError

DIGITS = ("+recipe=digits_lenet", "epochs=1", "tracking=none", "precision=fp64", "device=cpu", "execution.threads=1")


@pytest.mark.all
def test_strategy_with_a_server_runs_from_the_command_line(tmp_path: Path) -> None:
    done = trainer(
        "--config-dir",
        VOCABULARY,
        *DIGITS,
        "strategy=toy_server",
        "checkpoint=none",
        "launch.nproc=2",
        "hydra.run.dir=served",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 server, 2 workers" in done.stdout
    served = tmp_path / "served"
    assert (served / "serverlog.0").is_file()
    for rank in (0, 1):
        assert "[Epoch 0] validation loss: " in (served / f"workerlog.{rank}").read_text()
    assert json.loads((served / "result.json").read_text())["status"] == "done"

    alone = trainer(*DIGITS, "data.batch_size=64", "hydra.run.dir=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("served", "alone"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-10, err_msg=name)


def test_servers_are_refused_where_a_strategy_has_none() -> None:
    with pytest.raises(UserError, match=r"strategy=collective has no servers\. Type instead: launch\.servers=null"):
        run_here([*DIGITS, "strategy=collective", "launch.nproc=2", "launch.servers=1"])
