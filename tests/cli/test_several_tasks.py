"""A command that a launcher has started several times is refused where each would be a whole run, and otherwise
runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.runs import environment
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.engine_hosts import check_alone

SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
STEP = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "0"}
TRAIN_JOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}
FLEET = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0"}


def config(**launch: Any) -> RunConfig:
    return RunConfig.of({}).changed(launch=launch)


@pytest.mark.parametrize(
    ("told", "launch", "what", "instead"),
    [
        (
            STEP,
            {},
            "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0",
            "launch.nnodes=2 'launch.node_rank=${oc.env:SLURM_NODEID}'",
        ),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "1"},
            {},
            "SLURM_STEP_NUM_TASKS=4",
            "srun -n1 python -m trainer ... launch.nproc=4; or launch.env=none",
        ),
        ({**SBATCH, "SLURM_STEP_ID": "3"}, {}, "SLURM_NTASKS=4 SLURM_PROCID=0", "srun -n1"),
        ({**SBATCH, "SLURM_PROCID": "1"}, {}, "SLURM_PROCID=1", "srun -n1"),
        (STEP, {"nnodes": 2}, "SLURM_STEP_NUM_TASKS=4", "launch.nnodes=2"),  # two copies of each host's part
        (
            OPEN_MPI,
            {},
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
            "mpirun -n 1 python -m trainer ... launch.nproc=2",
        ),
        ({**SBATCH, **OPEN_MPI}, {}, "OMPI_COMM_WORLD_SIZE=2", "mpirun -n 1"),
        (HYDRA, {}, "PMI_SIZE=2 PMI_RANK=1", "launch.nnodes=2"),
        ({"PMIX_RANK": "1"}, {}, "PMIX_RANK=1", "mpirun -n 1"),
        ({"MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_RANK": "0"}, {}, "MV2_COMM_WORLD_SIZE=3", "launch.nproc=3"),
        (POD, {}, "WORLD_SIZE=4 RANK=0", "'launch.node_rank=${oc.env:RANK}'"),
        ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE=4", "launch.env=none"),
        (TRAIN_JOB, {}, "PET_NNODES=2 PET_NODE_RANK=0", "'launch.node_rank=${oc.env:PET_NODE_RANK}'"),
        ({"PET_NNODES": "1:3"}, {}, "PET_NNODES=1:3", "launch.env=none"),
        ({"JOB_COMPLETION_INDEX": "2"}, {}, "JOB_COMPLETION_INDEX=2", "launch.env=none"),
        (FLEET, {}, "PADDLE_TRAINERS_NUM=2", "launch.env=paddle"),
        (
            {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"},
            {},
            "SM_HOSTS=",
            "launch.nnodes=2 launch.node_rank=N",
        ),
        (
            {"NNODES": "2", "NODE_RANK": "0"},
            {},
            "NNODES=2 NODE_RANK=0",
            "launch.nnodes=2 'launch.node_rank=${oc.env:NODE_RANK}'",
        ),
        (
            {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0", **OPEN_MPI},
            {},
            "JSM_NAMESPACE_SIZE=2",
            "jsrun -n 1 python -m trainer ... launch.nproc=2",
        ),
        ({"JSM_NAMESPACE_SIZE": "2"}, {}, "JSM_NAMESPACE_SIZE=2", "jsrun -n 1"),
        (
            {"LSB_DJOB_NUMPROC": "4", "LSF_PM_TASKID": "1"},
            {},
            "LSB_DJOB_NUMPROC=4 LSF_PM_TASKID=1",
            "launch.nnodes=HOSTS",
        ),
        ({"PBS_TASKNUM": "2"}, {}, "PBS_TASKNUM=2", "launch.nnodes=HOSTS"),
        (STEP, {"env": None}, "SLURM_STEP_NUM_TASKS=4", "launch.env=none"),
    ],
)
def test_one_of_several_copies_of_a_run_is_refused(
    told: dict[str, str], launch: dict[str, Any], what: str, instead: str
) -> None:
    with pytest.raises(UserError, match=what) as raised:
        check_alone(config(**launch), told)
    assert instead in raised.value.instead and "launch.env=none" in raised.value.instead
    check_alone(config(**launch | {"env": "none"}), told)


@pytest.mark.parametrize(
    ("told", "launch"),
    [
        ({}, {}),
        (SBATCH, {}),
        (TORCHRUN, {}),
        ({**STEP, **TORCHRUN}, {}),
        ({**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, {}),  # a shell of salloc
        ({**SBATCH, "SLURM_STEP_ID": "4294967291"}, {}),  # a batch script
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, {"nnodes": 2, "node_rank": 1}),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, {}),
        ({"PMIX_RANK": "0"}, {}),
        ({"JOB_COMPLETION_INDEX": "0"}, {}),
        ({**POD, "WORLD_SIZE": "1"}, {}),
        ({**POD, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, {}),  # one pod of four processes
        ({**POD, "RANK": "1"}, {"nnodes": 2, "node_rank": 1}),
        (TRAIN_JOB, {"nnodes": 2}),
        ({"JOB_COMPLETION_INDEX": "1"}, {"nnodes": 2, "node_rank": 1}),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, {}),
        ({"SM_HOSTS": '["a","b"]'}, {"nnodes": 2}),
        ({"NNODES": "2"}, {}),
        ({"NNODES": "2", "NODE_RANK": "1"}, {"nnodes": 2, "node_rank": 1}),
        ({"NNODES": "1", "NODE_RANK": "0"}, {}),
        ({"LSB_DJOB_NUMPROC": "4"}, {}),
        ({"PBS_TASKNUM": "1"}, {}),  # batch scripts, which run once
        ({"PBS_TASKNUM": "3"}, {"nnodes": 2, "node_rank": 1}),
        (STEP, {"role": "worker", "rank": 0}),
        ({"WORLD_SIZE": "four", "SLURM_PROCID": ""}, {}),
    ],
)
def test_whoever_is_alone_or_knows_its_host_runs(told: dict[str, str], launch: dict[str, Any]) -> None:
    check_alone(config(**launch), told)


def test_copy_ends_with_exit_code_2_and_one_sentence_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", "+recipe=digits_lenet", "hydra.run.dir=run"]
    told = environment(**STEP)
    done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "error: SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0: srun starts 4 tasks of one job" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_hosts_number_comes_from_a_variable_as_the_advice_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    advised = ["launch.nnodes=2", "launch.node_rank=${oc.env:SLURM_NODEID}", "launch.master_addr=127.0.0.1"]
    code, out, error = run("+recipe=digits_lenet", "plan=true", "tracking=none", *advised)
    assert (code, error) == (0, "") and "host 1" in out.replace("\n", " "), out
