"""The promises of a run, kept with real command lines: what it prints, what it leaves, how it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import trainer as package
from tests.runs import ROOT, SMALL, TORCHRUN, points, read, torchrun, trainer
from trainer.errors import RunFailed, UserError

LINE = r"\[Epoch 0, batch 5\] loss: \d+\.\d{5}, acc1: \d\.\d{5}, acc5: \d\.\d{5}"
OWN = "model._target_=tests.e2e.own_models."


def test_digits_reach_97_percent_and_the_run_leaves_what_it_promises(tmp_path: Path) -> None:
    done = trainer(
        "+recipe=digits_lenet",
        "hydra.run.dir=run",
        "tracking=none",
        "execution.log_every=5",
        cwd=tmp_path,
        pictures=True,
    )
    assert done.returncode == 0, done.stderr
    import re

    assert re.search(LINE, done.stdout)
    run = tmp_path / "run"
    result, status, plan = (read(run / f"{name}.json") for name in ("result", "status", "plan"))
    assert result["metrics"]["val/acc1"] > 0.97
    assert result["status"] == status["state"] == "done"
    assert status["step"] == status["total"] == plan["length"]["total_steps"] == result["steps"] == 12 * 44
    assert status["percent"] == 100.0 and status["eta_s"] == 0.0
    assert result["samples"] == 12 * 44 * 32
    assert result["chosen"]["precision"] == "fp32" and result["why"]["precision"]
    assert result["data_source"] == "scikit-learn's handwritten digits"
    assert result["best"]["val/acc1"] == max(points(run, "val/acc1"))
    assert result["metrics"]["val/loss"] == points(run, "val/loss")[-1]
    for name in (
        ".hydra/overrides.yaml",
        "config.yaml",
        "model.safetensors",
        "checkpoints/best.safetensors",
        "curves.png",
    ):
        assert (run / name).stat().st_size, name
    assert "[Epoch 11] validation" in (run / "workerlog.0").read_text()
    assert "optimizer:" in (run / "config.yaml").read_text() and "${" not in (run / "config.yaml").read_text()
    last = done.stdout.strip().splitlines()[-3:]
    assert last[-1].startswith("repeat    python -m trainer +recipe=digits_lenet")
    assert "data wait" in done.stdout and points(run, "perf/data_wait")
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.all
@pytest.mark.parametrize("strategy", ["collective", "local_sgd"])
def test_two_workers_by_one_override(tmp_path: Path, strategy: str) -> None:
    done = trainer(
        "+recipe=digits_lenet",
        "epochs=4",
        f"strategy={strategy}",
        "launch.nproc=2",
        "tracking=none",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert read(run / "result.json")["metrics"]["val/acc1"] > 0.9
    assert done.stdout.count("[Epoch 0] validation") == 1
    for rank in (0, 1):
        assert "[Epoch 3] validation" in (run / f"workerlog.{rank}").read_text()


@pytest.mark.all
def test_batch_norm_model_trains_on_two_workers_with_random_images(tmp_path: Path) -> None:
    done = trainer(
        "+recipe=resnet50_random",
        "model=resnet18",
        "data.image_size=32",
        "data.batches=2",
        "data.batch_size=4",
        "data.val_batches=1",
        "launch.nproc=2",
        "strategy=collective",
        "strategy.sync_batch_norm=true",
        "execution.channels_last=true",
        "precision=bf16",
        "tracking=none",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run" / "result.json")["samples"] == 2 * 4 * 2


@pytest.mark.all
@pytest.mark.parametrize(
    "told", [["data._target_=tests.e2e.own_data.FewFlowers"], pytest.param([], marks=pytest.mark.long)]
)
def test_missing_flowers_are_replaced_loudly(tmp_path: Path, told: list[str]) -> None:
    done = trainer(
        "+recipe=resnet50_flowers",
        "model=convnet",
        "~model.zero_init_residual",
        "data.image_size=32",
        "data.batch_size=8",
        "limit_train_batches=2",
        "limit_val_batches=1",
        "epochs=1",
        "hydra.run.dir=run",
        "data.root=nowhere",
        "data.download=false",
        *told,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    from tests.runs import mlflow_runs

    assert done.stdout.count("ATTENTION: this is NOT Oxford Flowers-102") == 2
    assert read(tmp_path / "run" / "plan.json")["data"]["facts"]["stand_in"]
    assert read(tmp_path / "run" / "result.json")["stand_in"]
    [run] = mlflow_runs(tmp_path)
    assert run.data.tags["trainer.data_source"] == "embedded drawn flowers"
    assert "NOT Oxford" in run.data.tags["trainer.stand_in"]
    assert "embedded" in run.info.run_name


@pytest.mark.all
def test_missing_flowers_are_refused_when_asked(tmp_path: Path) -> None:
    done = trainer(
        "+recipe=resnet50_flowers", "data.root=nowhere", "data.download=false", "data.on_missing=error", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "data.root=nowhere" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.all
def test_users_own_yaml_and_model(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "recipe").mkdir()
    (tmp_path / "own_package.py").write_text("from tests.e2e.own_models import Mlp as MyNet\n")
    (tmp_path / "mine" / "model" / "my_net.yaml").write_text(
        "# mine\n_target_: own_package.MyNet\nnum_classes: ${data.num_classes}\nhidden: 48\n"
    )
    (tmp_path / "mine" / "recipe" / "my_recipe.yaml").write_text(
        "# @package _global_\n# mine\ndefaults:\n  - override /model: my_net\n  - override /data: digits\n"
        "name: my_recipe\nepochs: 2\n"
    )
    done = trainer(
        "--config-dir", "mine", "+recipe=my_recipe", "tracking=none", cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "outputs" / "my_recipe").iterdir()
    assert read(run / "result.json")["status"] == "done"
    assert "hidden: 48" in (run / "config.yaml").read_text()
    assert "repeat    python -m trainer --config-dir mine +recipe=my_recipe tracking=none\n" in done.stdout


def test_from_python_the_same_result_and_the_same_errors(tmp_path: Path) -> None:
    argv = [*SMALL, f"hydra.run.dir={tmp_path}/run", "tracking=none"]
    result = package.run(argv)
    assert result.status == "done" and result.steps == 44
    assert result.metrics["val/loss"] == read(tmp_path / "run" / "result.json")["metrics"]["val/loss"]
    with pytest.raises(UserError, match=r"optimizer\.lrr"):
        package.run([*argv, "optimizer.lrr=1"])
    with pytest.raises(RunFailed, match="the model broke on purpose"):
        package.run([*argv, f"{OWN}Breaks", "~model.in_channels", "~model.image_size"])
    assert read(tmp_path / "run" / "result.json")["status"] == "failed"


@pytest.mark.all
def test_failed_job_of_a_sweep_is_recorded_and_the_others_are_done(tmp_path: Path) -> None:
    done = trainer(
        "-m",
        *SMALL,
        f"{OWN}Breaks",
        "~model.in_channels",
        "~model.image_size",
        "+model.at=3,100000",
        "tracking=none",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert read(tmp_path / "sweep" / "0" / "result.json")["status"] == "failed"
    assert "broke on purpose" in read(tmp_path / "sweep" / "0" / "result.json")["error"]
    assert read(tmp_path / "sweep" / "1" / "result.json")["status"] == "done"
    table = (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in table] == ["status", "failed", "done"]


@pytest.mark.all
def test_sweep_with_two_workers_per_job_ends_and_tears_down_each_group(tmp_path: Path) -> None:
    done = trainer(
        "-m", *SMALL, "data.batch_size=16,32", "launch.nproc=2", "tracking=none", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for number, batch in ((0, 32), (1, 64)):
        run = tmp_path / "sweep" / str(number)
        assert read(run / "plan.json")["batches"]["global_size"] == batch
        assert read(run / "result.json")["status"] == "done"
        assert {"workerlog.0", "workerlog.1"} <= {p.name for p in run.iterdir()}
    assert "job 1 of 2" in done.stdout


@pytest.mark.all
def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    argv = [*SMALL, "tracking=none"]
    done = trainer(*torchrun(*argv, "hydra.run.dir=a"), cwd=tmp_path, **TORCHRUN)
    assert done.returncode == 0, done.stderr
    ours = trainer(*argv, "launch.nproc=2", "hydra.run.dir=b", cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert points(tmp_path / "a", "train/loss") == points(tmp_path / "b", "train/loss")
    assert {"workerlog.0", "workerlog.1"} <= set(os.listdir(tmp_path / "a"))
    [repeat] = [line for line in done.stdout.splitlines() if line.startswith("repeat")]
    assert repeat.endswith("tracking=none hydra.run.dir=a") and "null" not in repeat


@pytest.mark.all
def test_torchrun_with_wrong_input_starts_nothing(tmp_path: Path) -> None:
    done = trainer(*torchrun("+recipe=digits_lent"), cwd=tmp_path, **TORCHRUN)
    assert done.returncode != 0
    assert "+recipe=digits_lenet" in done.stderr
    assert not list(tmp_path.iterdir())


def test_runs_started_in_the_same_second_get_their_own_folders(tmp_path: Path) -> None:
    from trainer.job.claim_folder import claim

    folders = {claim(tmp_path / "outputs" / "now", chosen=False) for _ in range(3)}
    assert sorted(f.name for f in folders) == ["now", "now-1", "now-2"]
    assert claim(tmp_path / "mine", chosen=True) == claim(tmp_path / "mine", chosen=True) == tmp_path / "mine"


@pytest.mark.all
def test_two_hosts_equal_one_host(tmp_path: Path) -> None:
    from tests.pace import wait_for
    from tests.ports import ports
    from tests.runs import start

    [port] = ports(1)
    argv = [*SMALL, "tracking=none", "execution.log_every=1", "precision=fp64"]
    hosts = []
    for rank in (0, 1):
        (tmp_path / f"host{rank}").mkdir()
        topology = ["launch.nnodes=2", f"launch.node_rank={rank}", f"launch.master_port={port}", "hydra.run.dir=run"]
        hosts.append(start(*argv, *topology, cwd=tmp_path / f"host{rank}", GLOO_SOCKET_IFNAME="lo"))
    wait_for(lambda: all(host.poll() is not None for host in hosts), 120, "both hosts end")
    assert [host.returncode for host in hosts] == [0, 0], (tmp_path / "host1" / "screen.txt").read_text()
    package.run([*argv, "launch.nproc=2", f"hydra.run.dir={tmp_path}/one"])
    together = points(tmp_path / "one", "train/loss")
    assert points(tmp_path / "host0" / "run", "train/loss") == pytest.approx(together, abs=1e-10)
    assert (tmp_path / "host1" / "run" / "workerlog.1").exists()
    assert not (tmp_path / "host1" / "run" / "metrics.jsonl").exists()
