"""What another user of the machine does while a run starts, works and fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def common() -> Iterator[Path]:
    """A temporary folder as all users share it, reachable by all of them."""
    folder = Path(tempfile.mkdtemp(prefix="common-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_names_that_a_stranger_takes_in_the_common_temporary_folder_mean_nothing(common: Path, tmp_path: Path) -> None:
    (common / "mark").mkdir()
    (common / "mark").chmod(0o777)
    marker = common / "mark" / "taken"
    watch = [sys.executable, "-m", "tests.faults.stranger", str(common), str(marker)]
    stranger = subprocess.Popen(
        watch, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert stranger.stdin is not None and stranger.stdout is not None
    try:
        assert stranger.stdout.readline() == "ready\n"
        launched = subprocess.run(
            [sys.executable, "-m", "tests.launch.failing", str(tmp_path)],
            cwd=ROOT, env=environment(TMPDIR=str(common)), capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
    finally:
        stranger.stdin.close()
        seen = stranger.stdout.read().split()
        stranger.wait(10)
    assert "worker 1 ended with exit code 7" in launched.stdout, launched.stdout + launched.stderr
    assert "a secret of the model" in launched.stdout
    assert not marker.exists(), f"code of another user ran as {marker.read_text()}"
    assert seen, "it has watched"
    assert [name for name in seen if "pickle" in name] == []
    left = [path for path in common.rglob("*") if path.is_file() and path.stat().st_uid == 0]
    assert left == [], "nothing of ours stays there"


@needs_root
def test_what_a_launch_leaves_open_in_the_temporary_folder_is_for_its_user_alone(common: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.failing", str(tmp_path), "looks"],
        cwd=ROOT, env=environment(TMPDIR=str(common)), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    [modes] = [line for line in done.stdout.splitlines() if line.startswith("modes ")]
    assert modes.split()[1:] and set(modes.split()[1:]) == {"0o40700"}, done.stdout + done.stderr
    own = [line for line in done.stdout.splitlines() if line.startswith("own ")]
    assert own and all(line.split()[1] != str(common) for line in own), (
        "temporary files of workers lie in the run's folder"
    )
