"""Which of an engine's tasks a process is, from variables as the engines set them (recorded, or from their manuals)."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_several_tasks import FLEET, HYDRA, OPEN_MPI, SBATCH, STEP, TORCHRUN, TRAIN_JOB
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import engine_ranks, first_host
from trainer.host.engine_ranks import adopt
from trainer.host.engine_tasks import tasks_of
from trainer.planning.engine_hosts import of_engine

TWO_HOSTS = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": "10.0.0.1"}
FOUR = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1", "SLURM_PROCID": "3", "SLURM_NODEID": "1"}


def hosts(environment: dict[str, str], **launch: Any) -> tuple[int, int, str, int]:
    found = of_engine(RunConfig.of({}).changed(launch=launch), environment).launch
    return found.nnodes, found.node_rank, found.master_addr, found.master_port


@pytest.mark.parametrize(
    ("environment", "launch", "wanted"),
    [
        ({}, {}, (1, 0, "127.0.0.1", 0)),
        (SBATCH, {}, (1, 0, "127.0.0.1", 0)),
        (TORCHRUN, {}, (1, 0, "127.0.0.1", 0)),
        (FLEET, {}, (1, 0, "127.0.0.1", 0)),
        ({**TWO_HOSTS, "MASTER_PORT": "20007"}, {}, (2, 0, "10.0.0.1", 20007)),
        ({**TWO_HOSTS, "SLURM_NODEID": "1", "SLURM_PROCID": "1"}, {}, (2, 1, "10.0.0.1", 0)),
        ({**TWO_HOSTS, "SLURM_NODEID": "1"}, {"nnodes": 2}, (2, 1, "10.0.0.1", 0)),
        ({**TWO_HOSTS, "SLURM_NODEID": "1"}, {"env": "slurm"}, (2, 1, "10.0.0.1", 0)),
        (TWO_HOSTS, {"master_addr": "10.9.9.9", "master_port": 7}, (2, 0, "10.9.9.9", 7)),
        (TWO_HOSTS, {"env": "none"}, (1, 0, "127.0.0.1", 0)),
        (TWO_HOSTS, {"nnodes": 2, "node_rank": 1, "master_addr": "x"}, (2, 1, "x", 0)),  # by hand
        ({**HYDRA, "MASTER_ADDR": "m"}, {}, (2, 1, "m", 0)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "m"}, {}, (2, 0, "m", 0)),
        ({**TRAIN_JOB, "PET_MASTER_PORT": "29400"}, {}, (2, 0, "a", 29400)),
        ({**TRAIN_JOB, "PET_NODE_RANK": "1"}, {}, (2, 1, "a", 0)),
        ({"JOB_COMPLETION_INDEX": "1"}, {"nnodes": 3, "master_addr": "d-0.d"}, (3, 1, "d-0.d", 0)),
    ],
)
def test_task_of_each_host_is_that_hosts_launcher(
    environment: dict[str, str], launch: dict[str, Any], wanted: tuple[int, int, str, int]
) -> None:
    assert hosts(environment, **launch) == wanted


def test_train_job_says_how_many_workers_a_pod_has() -> None:
    assert of_engine(RunConfig.of({}), TRAIN_JOB).launch.nproc == 4
    assert of_engine(RunConfig.of({}).changed(launch={"nproc": 2}), TRAIN_JOB).launch.nproc == 2


def test_pod_0_of_an_indexed_job_is_found_in_the_service_of_this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_host.socket, "getfqdn", lambda: "digits-3.digits.ml.svc.cluster.local")
    assert hosts({"JOB_COMPLETION_INDEX": "3"}, nnodes=4)[2] == "digits-0.digits.ml.svc.cluster.local"
    with pytest.raises(
        UserError, match=r"a Job of Kubernetes does not say where host 0 is.*launch.master_addr=ADDRESS"
    ):
        hosts({"JOB_COMPLETION_INDEX": "2"}, nnodes=4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n[1-3,7]", "n1"), ("gpu[07-09].x", "gpu07.x"), ("a,b", "a"), ("one", "one"), ("r[2,5]n,z", "r2n")],
)
def test_slurms_first_host_is_its_address_else_its_name(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    asked: list[str] = []

    def scontrol(*words: str) -> str:
        asked.append(words[2])
        return f"NodeName={words[2]} NodeAddr=10.1.2.3 Port=6818\n"

    monkeypatch.setattr(first_host, "_scontrol", scontrol)
    assert first_host.first_host("slurm", 0, {"SLURM_STEP_NODELIST": nodes}) == "10.1.2.3" and asked == [first]
    monkeypatch.setattr(first_host, "_scontrol", lambda *words: "")
    assert first_host.first_host("slurm", 1, {"SLURM_JOB_NODELIST": nodes}) == first


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ({"nnodes": 3}, "launch.nnodes=3: srun has started 2 tasks, one on each host.*launch.nnodes=2"),
        ({"env": "mpi"}, "launch.env=mpi: no variable of it is set here.*launch.env=auto"),
    ],
)
def test_what_contradicts_the_engine_is_refused(launch: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        hosts(TWO_HOSTS, **launch)


def test_counts_of_tasks_by_host_are_read() -> None:
    many = {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_NODES": "4"}
    here = [tasks_of({**many, "SLURM_NODEID": str(node)})[0].here for node in range(4)]
    assert here == [2, 2, 2, 1]


def test_several_tasks_on_a_host_become_ranks_that_know_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks.private, "temporary_root", lambda: str(tmp_path))
    monkeypatch.setattr(engine_ranks, "_answers", lambda address, port: True)
    words = ["+recipe=digits_lenet"]
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    waiting = threading.Thread(target=adopt, args=(ranks[1], words))
    waiting.start()
    adopt(ranks[0], words)
    waiting.join(10)
    common = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINER_RUN_SECRET", "TRAINER_RANKS")
    assert [ranks[0][name] for name in common] == [ranks[1][name] for name in common]
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in ranks] == [("0", "0"), ("1", "1")]
    assert ranks[0]["MASTER_ADDR"] == "127.0.0.1" and len(ranks[0]["TRAINER_RUN_SECRET"]) == 64
    [note] = tmp_path.glob("*/note")
    assert stat.S_IMODE(note.stat().st_mode) == 0o600 and stat.S_IMODE(note.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, []),
        (SBATCH, []),
        (TORCHRUN, []),
        (TWO_HOSTS, []),
        (FOUR, ["launch.env=none"]),
        (FOUR, ["launch.nnodes=2"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ["launch.master_addr=x"]),
    ],
)
def test_other_processes_are_left_as_they_are(environment: dict[str, str], words: list[str]) -> None:
    before = dict(environment)
    adopt(environment, words)
    assert environment == before


def test_tasks_of_several_hosts_look_below_the_folder_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "MEET_S", 0.3)
    with pytest.raises(UserError, match=rf"task 3 of srun: sees no note of task 0 in {tmp_path}/\.tasks-.*share"):
        adopt(dict(FOUR), [f"hydra.run.dir={tmp_path}/run"])
    adopt({**FOUR, "SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1"}, [f"hydra.run.dir={tmp_path}/run"])
    assert list(tmp_path.glob(".tasks-*/note"))
