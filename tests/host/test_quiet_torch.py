"""What torch's C++ says of a store that is not there is not on a launcher's screen, where a sentence says it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.runs import ROOT, environment

ASKS = """
import os
from datetime import timedelta
from trainer.host.quiet_torch import LEVEL, import_quietly
import_quietly()
assert os.environ.get(LEVEL) == GIVEN
import torch.distributed as dist
try:
    dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=1))
except dist.DistError as error:
    print("sentence")
"""


@pytest.mark.all
@pytest.mark.parametrize(("given", "frames"), [(None, False), pytest.param("WARNING", True, marks=pytest.mark.all)])
def test_a_store_that_is_not_there_leaves_no_stack_frames_of_torch(given: str | None, frames: bool) -> None:
    level = {} if given is None else {"TORCH_CPP_LOG_LEVEL": given}
    code = f"GIVEN = {given!r}\n{ASKS}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(**level), capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "sentence\n", done.stderr
    assert ("frame #" in done.stderr) == frames and (frames or not done.stderr)
