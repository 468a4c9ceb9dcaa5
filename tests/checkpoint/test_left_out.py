"""Workers that keep what they leave out of their gradients: with more or fewer of them a run goes on without, if it
may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.checkpoint.test_identity import back_at
from tests.checkpoint.test_replicas import RUN, YES
from trainer.checkpoint.tensor_tree import read

AT, LAST = 10, 14
KINDS = {
    "comm_hook=powersgd": ("strategy=collective", "strategy.comm_hook=powersgd", "strategy.powersgd.start_step=3"),
    "comm_hook=dgc": ("strategy=collective", "strategy.comm_hook=dgc", "strategy.dgc.min_size=100"),
    "wire=int8": ("strategy=pserver_sync", "strategy.wire=int8", "launch.servers=1"),
}


@pytest.mark.all
@pytest.mark.parametrize("option", KINDS)
def test_what_they_left_out_is_said_to_be_lost_and_is_no_other_workers(option: str, tmp_path: Path) -> None:
    told = (*RUN, *KINDS[option], "data.global_batch_size=36", "verbosity=normal")
    ended = runs.trainer(*told, "launch.nproc=2", "hydra.run.dir=two", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert left_out(tmp_path / "two", AT, 0), "there is something to lose"
    back_at(tmp_path / "two", AT, tmp_path / "three")
    again = (*told, "launch.nproc=3", "hydra.run.dir=three", "resume=auto")
    refused = runs.trainer(*again, cwd=tmp_path)
    lost = "what workers have left out of their gradients: it is not added to a later update"
    assert refused.returncode == 2
    assert (
        f"the run had 2 workers, each with what strategy.{option} has left out, and has 3 (not carried over: {lost})"
        in refused.stderr
    )
    ended = runs.trainer(*again, YES, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"not carried over {lost}" in " ".join(ended.stdout.split())
    if option == "comm_hook=powersgd":
        updates = [left_out(tmp_path / "three", LAST, worker)["memory"]["iter"] for worker in range(3)]
        assert max(updates) < AT, "torch's memory began anew at each worker"


def left_out(run: Path, update: int, worker: int) -> Any:
    """What that worker has in a checkpoint of its own."""
    own = read(run / "checkpoints" / f"step-{update:09d}" / f"worker-{worker}.safetensors")["own"]
    return own.get("memory") or own.get("feedback")
