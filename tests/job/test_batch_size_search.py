"""data.batch_size=auto finds the largest batch that fits, and the run is the one that has this batch size."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch import nn

import trainer
from tests import runs
from trainer.errors import RunFailed, UserError
from trainer.host import memory
from trainer.host.memory import GIB
from trainer.job.batch_size_search import MOST, Try, largest
from trainer.planning import tracking_store
from trainer.run_folder.repeat import repeatable
from trainer.tracking import client
from trainer.tracking.client import Ended
from trainer.tracking.contract import TrackedRun

HERE = "tests.job.test_batch_size_search"
SMALL = """
    +recipe=digits_lenet device=cpu execution.threads=1 max_steps=4 execution.log_every=1 verbosity=quiet
    ~model.in_channels ~model.image_size data.num_workers=0 optimizer.lr=0.01
""".split()
MIB_PER_SAMPLE = 8


class Bounded(nn.Module):
    """Has memory for so many samples at once; with batch norm and dropout, so that a trial leaves traces if it can.

    Args:
        most: of each worker.
        how: what happens beyond.
    """

    def __init__(self, num_classes: int, most: list[int], how: str = "cuda") -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, num_classes)
        self.most, self.how = most[int(os.environ.get("RANK", "0"))], how

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) > self.most and (self.most or "RANK" in os.environ):  # not where it is checked
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB")
        if not self.training and self.how == "evaluated" and len(images) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has 1 GiB")
        if self.training and self.how == "broken" and len(images) > 8:
            raise ValueError("no such luck")
        return self.linear(self.drop(self.norm(images.flatten(1))))


class Spacious(nn.Module):
    """Keeps 8 MiB of each training sample until the gradient is made."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(images.flatten(1))
        if not self.training:
            return outputs
        return outputs * outputs.mean(1, keepdim=True).repeat(1, MIB_PER_SAMPLE << 18).exp().mean(1, keepdim=True)


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(folder: str, *more: str, most: str = "[18,18]") -> Any:
    model = (
        ()
        if any(o.startswith("model._target_") for o in more)
        else (f"model._target_={HERE}.Bounded", f"+model.most={most}")
    )
    tracking = () if any(o.startswith("tracking") for o in more) else ("tracking=none",)
    return trainer.run([*SMALL, *model, *tracking, f"hydra.run.dir={folder}", *more])


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("truth", [1, 2, 3, 9, 16, 17, 31, 32, 33, 63, 100, 127, 500, 1437, 1438, 5000])
@pytest.mark.parametrize("most", [1, 20, 1438, MOST])
def test_the_search_finds_the_largest_size_in_few_tries(truth: int, most: int) -> None:
    tried: list[int] = []

    def try_size(size: int) -> Try:
        tried.append(size)
        return Try(size <= truth, "")

    found = largest(try_size, most)
    best = min(truth, most)
    assert best * 15 / 16 < found <= best and (found == best or best > 16)
    assert len(tried) == len(set(tried)) <= 22 and max(tried) <= most
    assert largest(lambda size: Try(False, ""), most) == 0 == largest(lambda size: Try(True, ""), 0)


@pytest.mark.parametrize("each", [400_000_000, 60_000_000, 1_000_003])
@pytest.mark.parametrize("room", [80 * GIB, 141 * GIB])
@pytest.mark.parametrize("block", [1, 20 << 20])
def test_two_small_batches_and_one_more_are_enough(each: int, room: int, block: int) -> None:
    """As on a GPU: weights and their state, so much for each sample, and memory in blocks."""
    tried: list[int] = []

    def try_size(size: int) -> Try:
        tried.append(size)
        peak = -(-(700_000_000 + each * size) // block) * block
        return Try(peak <= room, "", peak, room)

    found, best = largest(try_size, MOST), (room - 700_000_000) // each
    assert tried[:2] == [32, 64] and found == tried[-1] and len(tried) == 3 + (best > 64 * 64), tried
    assert best * 15 / 16 < found <= best


@pytest.mark.parametrize("curve", [0.9, 1.0, 1.05, 1.3])
@pytest.mark.parametrize("jump", [0, 200, 900])
def test_a_wrong_prediction_costs_tries_and_no_precision(curve: float, jump: int) -> None:
    """The peak bends, or a kernel takes more memory from some size on."""
    tried: list[int] = []

    def peak(size: int) -> int:
        return int(GIB + 50_000_000 * size**curve + 5 * GIB * (0 < jump < size))

    def try_size(size: int) -> Try:
        tried.append(size)
        return Try(peak(size) <= 80 * GIB, "", peak(size), 80 * GIB)

    found = largest(try_size, MOST)
    best = next(size for size in range(1, MOST) if peak(size + 1) > 80 * GIB)
    assert best * 15 / 16 < found <= best and len(tried) <= 12, (found, best, tried)


@pytest.mark.all
def test_the_run_is_the_one_with_that_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    auto, given = run("auto", "data.batch_size=auto"), run("given", "data.batch_size=18")
    assert Path("auto/model.safetensors").read_bytes() == Path("given/model.safetensors").read_bytes()
    assert runs.points(Path("auto"), "train/loss") == runs.points(Path("given"), "train/loss")
    assert auto.metrics == given.metrics | {name: v for name, v in auto.metrics.items() if name.startswith("perf/")}
    config, same = (yaml.safe_load(Path(name, "config.yaml").read_text()) for name in ("auto", "given"))
    assert config == same and config["data"]["batch_size"] == 18
    plan, same = read("auto/plan.json"), read("given/plan.json")
    assert plan["remarks"]["why"].pop("batch_size").startswith("the most that fits")
    for one in (plan, same):  # numbers of processes and ports are each run's own
        del one["paths"]["run_dir"], one["topology"]["processes"], one["topology"]["environment"]
    assert plan == same
    assert read("auto/result.json")["chosen"]["batch_size"] == read("auto/status.json")["batch_size"] == 18
    assert {path.name for path in Path("auto").iterdir()} == {path.name for path in Path("given").iterdir()}
    said = capsys.readouterr().out
    assert (
        "data.batch_size=auto: 16 fits" in said
        and "19 does not fit (CUDA out of memory. Tried to allocate 2.00 GiB," in said
    )
    assert "optimizer.lr stays 0.01" in said
    repeat = next(line for line in said.splitlines() if line.startswith("repeat"))
    assert "data.batch_size=18" in repeat and "batch_size=auto" not in repeat


@pytest.mark.long
def test_all_workers_have_the_smallest() -> None:
    run("run", "data.batch_size=auto", "launch.nproc=2", most="[32,9]")
    plan = read("run/plan.json")
    assert (plan["batches"]["size"], plan["batches"]["global_size"]) == (9, 18)


@pytest.mark.long
def test_merged_batches_the_average_and_a_scaled_rate() -> None:
    more = """
        strategy.gradient_merge.k_steps=2 ema.decay=0.9 optimizer.lr_scaling=linear optimizer.lr_base_batch=18
    """.split()
    run("run", "data.batch_size=auto", *more)
    plan = read("run/plan.json")
    assert (plan["batches"]["size"], plan["batches"]["global_size"], plan["batches"]["lr"]) == (18, 36, 0.02)


@pytest.mark.all
def test_a_try_that_is_killed_ends_no_run() -> None:
    assert run("run", "data.batch_size=auto", "+model.how=killed").status == "done"
    assert read("run/plan.json")["batches"]["size"] == 18


def test_all_samples_are_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "data.batch_size=auto", "data.val_fraction=0.9", most="[10000]")
    plan = read("run/plan.json")
    assert plan["batches"]["size"] == plan["data"]["facts"]["train_samples"] and plan["length"]["steps_per_epoch"] == 1
    assert "all training samples fit" in capsys.readouterr().out


@pytest.mark.all
def test_memory_of_a_host_is_the_limit() -> None:
    here = memory.held_by([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]) / GIB
    limit = f"data.memory_limit_gib={here + 1.0:.3f}"
    run("run", "data.batch_size=auto", limit, f"model._target_={HERE}.Spacious")
    size = read("run/plan.json")["batches"]["size"]
    # x.repeat, its exponential and a gradient of each are there at once
    assert 4 <= size <= 1024 // (2 * MIB_PER_SAMPLE), size


@pytest.mark.all
def test_other_errors_are_no_lack_of_memory() -> None:
    with pytest.raises(RunFailed, match=r"a try with 32 samples per worker failed: [\s\S]*no such luck"):
        run("run", "data.batch_size=auto", "+model.how=broken", most="[100]")
    log = Path("run/.batch_size/32/workerlog.0")
    assert "ValueError" in read("run/result.json")["error"] and log.is_file()
    run("run", "data.batch_size=8")
    assert not log.exists()


@pytest.mark.all
def test_a_validation_for_which_memory_is_not_enough_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match=r"memory is not enough.*\(in an evaluation: CUDA out of memory\. Tried to all"):
        run("run", "data.batch_size=auto", "data.val_batch_size=64", "+model.how=evaluated", most="[100]")
    assert "data.batch_size=auto: 32 does not fit (in an evaluation: CUDA out of memory" in capsys.readouterr().out


@pytest.mark.all
def test_not_one_sample_fits() -> None:
    with pytest.raises(RunFailed, match=r"memory is not enough \(CUDA out of memory.*fewer samples are refused"):
        run("run", "data.batch_size=auto", most="[0]")
    assert read("run/result.json")["status"] == "failed" and not Path("run/.batch_size").exists()


@pytest.mark.all
def test_a_run_that_goes_on_keeps_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "data.batch_size=auto")
    capsys.readouterr()
    run("run", "data.batch_size=auto", "resume=auto", "resume.allow_changes=true", "max_steps=6", most="[40]")
    plan = read("run/plan.json")
    assert plan["batches"]["size"] == 18 and plan["remarks"]["why"]["batch_size"] == "as in step-000000004"
    assert "fits" not in capsys.readouterr().out


def test_a_plan_says_that_it_will_be_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "data.batch_size=auto", "plan=true")
    said = capsys.readouterr().out
    assert "32 per worker x 1 worker = 32 global  (auto: the most that fits is searched for before the training" in said
    assert " fits (" not in said and not Path("run").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["data.global_batch_size=64"], "data.global_batch_size=64 sets them"),
        (["launch.nnodes=2", "launch.master_addr=127.0.0.1"], "is searched for on one host"),
        (["data.memory_limit_gib=0"], "must be greater than 0"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(more: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        run("run", "data.batch_size=auto", *more)
    assert not Path("run").exists()


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="torchrun has started"):
        run("run", "data.batch_size=auto")


class Told:
    """Stands for the tracker: keeps what it is told."""

    def __init__(self) -> None:
        self.opened: TrackedRun | None = None
        self.tags: dict[str, str] = {}

    def open(self, folder: Path, run: TrackedRun, secrets: list[str]) -> None:
        self.opened = run

    def close(self, folder: Path, status: str, tags: dict[str, str], patience: float) -> dict[str, Ended]:
        self.tags = tags
        return {"mlflow": Ended("1")}

    def trained(self, folder: Path) -> None:
        pass


@pytest.mark.all
def test_the_tracked_run_has_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()

    @contextlib.contextmanager
    def tracking(trackers: Any) -> Iterator[Told]:
        yield told

    monkeypatch.setattr(client, "tracking", tracking)
    monkeypatch.setattr(tracking_store, "try_tracking", lambda config, plan: "")
    run("run", "data.batch_size=auto", "tracking.uri=sqlite:///none.db")
    assert told.opened is not None and str(told.opened.params["data.batch_size"]) == "18"
    assert told.tags["trainer.batch_size"].startswith("18: the most that fits")
    assert "data.batch_size=18" in told.tags["mlflow.note.content"]


@pytest.mark.long
def test_each_job_of_a_sweep_searches(tmp_path: Path) -> None:
    argv = (*SMALL, f"model._target_={HERE}.Bounded", "+model.most=[9],[18]", "data.batch_size=auto", "tracking=none")
    ended = runs.trainer("-m", *argv, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [read(f"sweep/{job}/plan.json")["batches"]["size"] for job in (0, 1)] == [9, 18]


def test_a_command_is_repeated_with_the_number() -> None:
    assert repeatable(["+recipe=x", "data.batch_size=auto", "epochs=1"], 18) == [
        "+recipe=x",
        "data.batch_size=18",
        "epochs=1",
    ]
    assert repeatable(["+recipe=x"], 18) == ["+recipe=x", "data.batch_size=18"]
    assert repeatable(["+recipe=x", "data.batch_size=4"], None) == ["+recipe=x", "data.batch_size=4"]


def test_memory_limits_of_containers_are_seen(tmp_path: Path) -> None:
    def group(folder: Path, limit: tuple[str, object], used: tuple[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (limit, used, ("memory.stat", "anon 5\ninactive_file 30")):
            (folder / name).write_text(str(value))

    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    group(tmp_path / "a", ("memory.max", 1000), ("memory.current", 400))
    group(tmp_path / "a/b", ("memory.max", "max"), ("memory.current", 400))
    assert memory.free(tmp_path, own) == 1000 - 400 + 30
    own.write_text("4:cpu,memory:/c\n3:pids:/\n")
    group(tmp_path / "memory/c", ("memory.limit_in_bytes", 500), ("memory.usage_in_bytes", 300))
    group(tmp_path / "memory", ("memory.limit_in_bytes", 9223372036854771712), ("memory.usage_in_bytes", 300))
    assert memory.free(tmp_path, own) == 500 - 300 + 30
    assert memory.free(tmp_path, tmp_path / "none") > 1 << 20
