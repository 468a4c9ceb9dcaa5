"""Commands that stand for Slurm's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COMMANDS = {
    # Two hosts: each task ends with the code in CODE.N, or not at all where there is none.
    "srun": """
while [ "$1" != bash ]; do shift; done
for number in 0 1; do [ -e "$FAKES/code.$number" ] && SLURM_NODEID=$number "$@"; done
[ -e "$FAKES/code.0" ] && [ -e "$FAKES/code.1" ] || exec sleep 60""",
    "trainer": 'printf "%s\\n" "$@" >"$FAKES/words.$SLURM_NODEID"\nexit "$(cat "$FAKES/code.$SLURM_NODEID")"',
    "scontrol": """
case "$1 $2" in
"show hostnames") printf 'n1\\nn2\\n' ;;
"show node") echo "NodeName=$3 NodeAddr=10.0.0.${3#n} Port=1" ;;
"show job") cat "$FAKES/shown" ;;
"show partition" | "show config") cat "$FAKES/$2" ;;
"requeue "*) echo "$@" >>"$FAKES/asked"; (sleep 1; kill -KILL "$PPID" $(pgrep -P "$PPID")) >/dev/null 2>&1 & ;;
*) echo "$@" >>"$FAKES/asked" ;;
esac""",
    "squeue": "echo $4.batch; echo $4.0",
    "scancel": 'echo scancel "$@" >>"$FAKES/asked"',
}
SHOWN = "JobId=12 JobState={} Reason={} Restarts={} ExitCode={} NodeList=n[1-2] BatchHost=n1"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stand for Slurm's, first in PATH."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKES", str(folder))
    (folder / "shown").write_text(f"{SHOWN.format('RUNNING', 'None', 0, '0:0')}\n")
    return folder
