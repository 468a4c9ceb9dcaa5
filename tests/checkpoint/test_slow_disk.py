"""A slow disk: the training waits for the copy alone, no second write is queued up, and each checkpoint that is left
out is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import runs
from tests.checkpoint.test_identity import COMMANDS, DIGITS, EVERYTHING
from trainer.checkpoint import store, tensor_tree

UNTIL = 5
CASES = {"alone": DIGITS, "collective": COMMANDS["collective"], "local_sgd": COMMANDS["local_sgd"]}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_while_a_slow_disk_writes_and_what_is_left_out_is_said(case: str, tmp_path: Path) -> None:
    """The first worker's disk is slow; the other one has written its parts of checkpoints that the first leaves out."""
    slow = f"callbacks=[{{_target_:tests.checkpoint.slow_writes.SlowWrites,until:{UNTIL}}}]"
    command = (*CASES[case], *EVERYTHING, "epochs=1", "checkpoint.background=true", slow, "hydra.run.dir=run")
    ended = runs.trainer(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "run"
    said = (run / "workerlog.0").read_text()
    for step in range(2, UNTIL):
        assert f"no checkpoint at update {step}: the one before is still being written" in said
    assert (run / "threads").read_text() == "1"
    whole = [store.step_of(folder.name) for folder in store.found(run / "checkpoints") if store.is_whole(folder, True)]
    assert {1, 7} <= {*whole} and not {*whole} & {*range(2, UNTIL)}, whole
    assert not list((run / "checkpoints").glob("*.partial"))
    written = tensor_tree.read(store.folder_of(run / "checkpoints", 1) / store.part_of(0), ["model"])["model"]
    kept = load_file(run / "first")
    assert all(torch.equal(value, kept[name]) for name, value in written.items()), "those of that update, and no later"
