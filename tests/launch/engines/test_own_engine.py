"""The page's example of an engine of one's own, against commands that stand for LSF's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import write_files
from tests.runs import environment

COMMANDS = {
    "bsub": 'cat >job.sh; (bash job.sh; touch over) </dev/null >/dev/null 2>&1 & echo "Job <7> is submitted."',
    "bjobs": "if [ -e over ]; then echo DONE; else echo RUN; fi",
    "bkill": 'echo "$@" >killed',
}


@pytest.mark.all
def test_engine_of_the_page_submits_follows_and_ends_with_the_jobs_code(tmp_path: Path) -> None:
    write_files("adding.md", tmp_path)
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ours = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "trainer", "--config-dir", "mine", "+recipe=digits_lenet", "launch=lsf"]
    words = ["launch.options.q=normal", "tracking=none", "max_steps=2", "hydra.run.dir=run"]
    done = subprocess.run([*command, *words], cwd=tmp_path, env=ours, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LSF job 7: running (RUN)" in done.stdout and "LSF job 7: ended with exit code 0" in done.stdout
    assert "done 2 updates" in done.stdout and "#BSUB -q normal" in (tmp_path / "job.sh").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"
    (tmp_path / "over").unlink()
    refused = subprocess.run(
        [*command, *words, "launch.nnodes=2"], cwd=tmp_path, env=ours, capture_output=True, text=True, timeout=200
    )
    assert refused.returncode == 2 and "launch=lsf: runs one job on one host" in refused.stderr
