"""What contradicts an engine is refused on the command line, before anything is submitted or written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.refusals import Case, cases

DIGITS = "+recipe=digits_lenet tracking=none launch.dry_run=true launch="
PLACES = """
    slurm launch.ips=10.0.0.1,10.0.0.2 | slurm decides where the hosts are => the command without launch.ips
    slurm launch.nnodes=2 launch.node_rank=1 | launch.node_rank=1 => the command without launch.node_rank
    slurm launch.nnodes=2 launch.master_addr=n1 | launch.master_addr=n1 => the command without launch.master_addr
    kubernetes launch.image=x launch.volume=runs launch.node_rank=1 | kubernetes decides => without launch.node_rank
    kubernetes launch.image=x launch.volume=runs launch.ips=a,b | launch.ips=a,b => the command without launch.ips
    ray launch.master_addr=10.0.0.1 | ray decides => the command without launch.master_addr
    ray launch.role=worker launch.rank=0 | launch.role=worker => the command without launch.role
    mpi launch.ips=10.0.0.1,10.0.0.2 | mpi decides => launch.hosts=HOST,HOST with launch.nnodes=2
    mpi launch.nnodes=2 launch.node_rank=1 | launch.node_rank=1 => the command without launch.node_rank
    slurm launch.ips=10.0.0.1,10.0.0.2 plan=true | slurm decides => the command without launch.ips
"""
GPUS = """
    slurm device=cpu launch.gpus=2 | launch.gpus=2 | device=cpu uses none => device=cuda
    ray device=cpu launch.gpus=2 | launch.gpus=2 | device=cpu uses none => device=cuda
    slurm device=cpu launch.options.gres=gpu:2 | launch.options.gres=gpu:2 | device=cpu uses none => device=cuda
    slurm device=cuda launch.nproc=4 launch.gpus=2 | launch.gpus=2 | each of 4 workers => launch.gpus=4
    slurm device=cuda launch.nproc=4 launch.options.gres=gpu:a100:2
        launch.options.gres=gpu:a100:2 | each of 4 workers => launch.gpus=4, or launch.nproc=2
    slurm device=cuda launch.nproc=4 launch.nnodes=2 launch.options.gpus=4 | launch.options.gpus=4 => launch.nproc=2
    slurm device=cuda launch.gpus=0 | launch.gpus=0 | each of 1 worker => launch.gpus=1, or device=cpu
    slurm device=cuda launch.gpus=2 launch.options.gpus-per-node=2 | launch.gpus is set as well => launch.gpus alone
    slurm device=cuda launch.options.gpus=all | says no number of GPUs => launch.gpus=4
"""


def args(case: Case) -> list[str]:
    return shlex.split(case.typed)


@pytest.mark.parametrize("case", cases(DIGITS, PLACES, GPUS), ids=lambda case: case.typed)
def test_what_contradicts_the_engine_is_refused(run: Run, folder: Path, case: Case) -> None:
    code, _, error = run(*args(case))
    assert code == 2 and error.count("Type instead: ") == 1, error
    said, _, instead = error.partition("Type instead: ")
    assert all(words in said for words in case.says) and case.instead in instead, error
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("typed", "directives"),
    [
        ("launch.nproc=4", ["--gpus-per-node=4"]),
        ("launch.nproc=4 launch.gpus=8", ["--gpus-per-node=8"]),
        ("launch.nproc=4 launch.options.gres=gpu:a100:4", ["--gres=gpu:a100:4"]),
        ("launch.nproc=2 launch.nnodes=2 launch.options.gpus=a100:4", ["--gpus=a100:4"]),
        ("launch.options.gres=gpu", ["--gres=gpu"]),
        ("launch.options.gres=nvme:1", ["--gpus-per-node=1", "--gres=nvme:1"]),
    ],
)
def test_gpus_are_asked_for_once(run: Run, typed: str, directives: list[str]) -> None:
    code, text, error = run(*f"{DIGITS}slurm device=cuda data.batch_size=8 {typed}".split())
    found = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH --g")]
    assert code == 0 and found == directives, error
