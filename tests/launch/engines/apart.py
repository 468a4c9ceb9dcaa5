"""Hosts without a common disk: each has its own folder for temporary files; ``trainer`` there is a short script."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runs import ROOT

CARRIED = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
sys.executable = {task!r}  # starts the command that is carried
os.environ["TMPDIR"] = disk = os.path.join({disks!r}, "disk." + os.environ.get({host!r}, "batch"))
os.makedirs(disk, exist_ok=True)
if "SLURM_NODEID" in os.environ:
    os.environ["SLURM_PROCID"] = os.environ["SLURM_NODEID"]
from trainer.launch.engines.carried import main
assert sys.argv[1:3] == ["-m", "trainer.launch.engines.carried"]
assert "torch" not in sys.modules
sys.exit(main(sys.argv[3:]))
"""
TASK = """#!{python}
import os, pathlib, sys
assert sys.argv[1:3] == ["-m", "trainer"]
folder, host = pathlib.Path(os.environ["TRAINER_RUN_DIR"]), os.environ.get({host!r}, "0")
with (folder / f"workerlog.{{host}}").open("a") as log:
    log.write(f"life of host {{host}}\\n")
(folder / "checkpoints" / "step-000000001").mkdir(parents=True)
(folder / "checkpoints" / "step-000000001" / "COMPLETE").touch()
if host == "0":
    (folder / "result.json").write_text('{{"status": "done"}}')
print("words of host", host, sys.argv[3:], os.environ["TRAINER_COPIES"], os.environ["TRAINER_NAMED"])
sys.exit(int(open({codes!r} + host).read()))
"""


def python_apart(folder: Path, host: str) -> str:
    """A command that stands for Python on the hosts. Their disks are ``FOLDER/disk.N``, and a task ends with the code
    in ``FOLDER/code.N``.

    Args:
        host: the engine's variable with the number of the host.
    """
    words = {"python": sys.executable, "root": str(ROOT), "host": host, "disks": str(folder)}
    words |= {"task": str(folder / "task"), "codes": f"{folder}/code."}
    for name, text in (("python", CARRIED), ("task", TASK)):
        (folder / name).write_text(text.format(**words))
        (folder / name).chmod(0o755)
    return str(folder / "python")


def end_with(folder: Path, *codes: int) -> None:
    """Let the next tasks end with these codes."""
    for number, code in enumerate(codes):
        (folder / f"code.{number}").write_text(str(code))


def left_on_disks(folder: Path) -> list[str]:
    """What is left in the hosts' folders."""
    return sorted(path.name for disk in folder.glob("disk.*") for path in disk.iterdir())
