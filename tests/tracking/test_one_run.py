"""A training that is killed and goes on is one run to who looks: in MLflow, in its folder, on the screen."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from tests.pace import wait_for
from tests.runs import mlflow_runs, read, start, trainer
from tests.tracking.test_trackers import in_tensorboard
from trainer import __version__, checkpoints
from trainer.checkpoint import store
from trainer.run_folder import lives
from trainer.run_folder.tracking_file import position
from trainer.tracking import reopened_run, run_lookup
from trainer.tracking.contract import TrackedRun
from trainer.tracking.describe import _lived

TRACKERS = ("mlflow", "tensorboard")
TYPED = (
    "+recipe=digits_lenet",
    "epochs=1",
    "execution.log_every=1",
    "checkpoint.every_steps=10",
    "checkpoint.background=false",
    "tracking=[mlflow,tensorboard]",
    "tracking.log_model=false",
    "tracking.system_every_s=null",
    "callbacks=[{_target_: tests.faults.gate.Gate, at: 27, until: go}]",
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which ``run`` was killed by SIGKILL at update 27 of 44 and went on; and what the second life
    showed."""
    folder = tmp_path_factory.mktemp("resumed")
    run = folder / "run"
    process = start(*TYPED, "hydra.run.dir=run", cwd=folder)
    try:
        wait_for(lambda: all(b'"step": 26' in sent(run, name) for name in TRACKERS), 90, "sent")
    finally:
        process.kill()
        process.wait()
    (run / "go").touch()
    done = trainer(*TYPED, "hydra.run.dir=run", "resume=auto", "launch.timeout_s=77", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def sent(run: Path, name: str) -> bytes:
    """The points that a tracker has acknowledged."""
    size = position(run, name).sent_bytes
    return (run / "metrics.jsonl").read_bytes()[:size] if size else b""


def in_file(run: Path) -> Counter[tuple[str, int]]:
    """How often each name and update is written."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return Counter((name, line["step"]) for line in lines for name in line["metrics"])


def at_server(folder: Path, run: Any) -> Counter[tuple[str, int]]:
    """How often MLflow has them."""
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return Counter((k, m.step) for k in run.data.metrics for m in client.get_metric_history(run.info.run_id, k))


def first_run(folder: Path) -> Any:
    """The one that the folder's first run is in MLflow."""
    [run] = [r for r in mlflow_runs(folder) if r.data.tags["trainer.run_dir"] == str(folder / "run")]
    return run


@pytest.mark.all
def test_mlflow_has_one_run_with_every_point_once(resumed: tuple[Path, str]) -> None:
    folder, _ = resumed
    run, written = first_run(folder), in_file(folder / "run")
    assert run.info.status == "FINISHED" and at_server(folder, run) == written
    assert [written["train/loss", step] for step in range(1, 45)] == [1] * 44
    tags = run.data.tags
    assert (tags["trainer.resumed"], tags["trainer.changed.launch.timeout_s"]) == ("1", "77.0")
    assert "trainer.ended" not in tags and "trainer.changed.resume.path" not in tags
    rows = [line for line in tags["mlflow.note.content"].splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    told = [row.strip("| ").split(" | ") for row in rows]
    assert [how for *_, how in told] == ["killed", "done"]
    began = [life.began for life in lives.read(folder / "run")]
    assert (
        [row[1] for row in told] == began
        and began == sorted(began)
        and began[0] <= told[0][2] <= began[1] <= told[1][2]
    )


def test_tensorboard_has_every_point_once_in_the_same_folder(resumed: tuple[Path, str]) -> None:
    folder, shown = resumed
    run = folder / "run"
    assert in_tensorboard(run) == in_file(run)
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 2, "one file of each life"
    assert "tensorboard --logdir run/tensorboard" in shown
    tracking = read(run / "result.json")["tracking"]
    assert {name: (one["unsent"], one["error"]) for name, one in tracking.items()} == dict.fromkeys(TRACKERS, (0, ""))
    assert read(run / "status.json")["tracking"] == tracking


def test_the_tag_counts_the_lives_before_the_last_command() -> None:
    three = [lives.LifeRecord(number, "") for number in (1, 2, 3)]
    assert [_lived(three[:count], None) for count in range(4)] == [{}, *({"trainer.resumed": f"{n}"} for n in range(3))]


def test_the_folder_tells_of_both_lives(resumed: tuple[Path, str]) -> None:
    run = resumed[0] / "run"
    first, second = lives.read(run)
    assert (first.how, first.first, second.how, second.first, second.last) == ("killed", 0, "done", 20, 44)
    assert first.last >= 26 and read(run / "status.json")["life"] == 2
    log = (run / "workerlog.0").read_text()
    assert log.index("batch 25") < log.index("goes on from") < log.index("batch 43")


def test_a_checkpoint_names_its_mlflow_run_and_the_versions_that_wrote_it(
    resumed: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was copied elsewhere alone."""
    folder, _ = resumed
    last, run_id = folder / "run" / "checkpoints" / "step-000000044", first_run(folder).info.run_id
    packages = {name: version(name) for name in ("torchvision", "numpy", "mlflow")}
    wanted = {"python": platform.python_version(), "trainer": __version__, "torch": torch.__version__, **packages}
    about = store.about(last)
    assert about.run_id == run_id
    assert {name: told.partition("+")[0] for name, told in about.versions.items()} == {
        **wanted,
        "torch": version("torch"),
    }
    assert about.versions.get("torch") == torch.__version__
    shutil.copytree(last, folder / "elsewhere" / last.name)
    assert checkpoints.main(["show", str(folder / "elsewhere" / last.name)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"MLflow run {run_id}" in shown and all(f"{name} {one}" in shown for name, one in wanted.items())


def test_the_plan_says_what_it_goes_on_from_and_what_it_keeps(resumed: tuple[Path, str]) -> None:
    shown = resumed[1]
    assert "resumes              checkpoints/step-000000020 after update 20 of 44 (epoch 0, update 20)" in shown
    assert "changed, harmless  launch.timeout_s was" in shown and "resume.path was" not in shown
    [repeat] = [line for line in shown.splitlines() if line.startswith("repeat")]
    assert repeat.endswith(" resume=fresh") and "resume=auto" not in repeat and "resume.path" not in repeat
    assert re.search(r"every 10 updates, every epoch and every 10 min, [\d.]+ kB each, the 2 newest stay", shown)


@pytest.mark.all
def test_another_folder_goes_on_with_an_mlflow_run(resumed: tuple[Path, str]) -> None:
    """Its checkpoint is the last one; all points are copied."""
    folder, _ = resumed
    run_id = first_run(folder).info.run_id
    typed = [*(t for t in TYPED if not t.startswith("callbacks")), "hydra.run.dir=other"]
    done = trainer(*typed, f"resume={run_id}", "resume.allow_changes=true", "epochs=2", "max_steps=46", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    [new] = [r for r in mlflow_runs(folder) if r.data.tags["trainer.run_dir"] == str(folder / "other")]
    written = in_file(folder / "other")
    assert new.data.tags["trainer.resumed_from"] == str(folder / "run" / "checkpoints" / "step-000000044")
    assert at_server(folder, new) == written and [written["train/loss", n] for n in range(1, 47)] == [1] * 46
    assert [life.first for life in lives.read(folder / "other")] == [0, 20, 44]
    assert (folder / "other" / "checkpoints" / "best.safetensors").is_file()


@pytest.mark.all
def test_a_copied_folder_gets_a_run_of_its_own_and_a_moved_one_keeps_its_run(tmp_path: Path) -> None:
    typed = [*(t for t in TYPED if not t.startswith("callbacks")), "execution.log_every=9", "resume=auto"]
    assert trainer(*typed, "hydra.run.dir=run", "epochs=1", cwd=tmp_path).returncode == 0
    [first] = mlflow_runs(tmp_path)
    points = at_server(tmp_path, first)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    more = ["epochs=2", "max_steps=48", "resume.allow_changes=true"]
    done = trainer(*typed, *more, "hydra.run.dir=copy", cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert (f"{tmp_path}/copy is a copy of {tmp_path}/run, which has the mlflow run {first.info.run_id}, ") in said, (
        done.stdout + done.stderr
    )
    before, other = sorted(mlflow_runs(tmp_path), key=lambda run: run.info.run_id != first.info.run_id)
    assert at_server(tmp_path, before) == points and before.data.tags["trainer.run_dir"] == str(tmp_path / "run")
    assert at_server(tmp_path, other) == in_file(tmp_path / "copy")
    assert other.data.tags["trainer.resumed_from"] == first.info.run_id

    (tmp_path / "copy").rename(tmp_path / "moved")
    assert trainer(*typed, *more, "max_steps=50", "hydra.run.dir=moved", cwd=tmp_path).returncode == 0
    (tmp_path / "link").symlink_to("run")
    assert trainer(*typed, *more, "hydra.run.dir=link", cwd=tmp_path).returncode == 0
    before, other = sorted(mlflow_runs(tmp_path), key=lambda run: run.info.run_id != first.info.run_id)
    assert at_server(tmp_path, other) == in_file(tmp_path / "moved")
    assert at_server(tmp_path, before) == in_file(tmp_path / "run")
    assert {max(step for _, step in at_server(tmp_path, run)) for run in (before, other)} == {48, 50}


@pytest.mark.all
@pytest.mark.parametrize(
    ("more", "why"), [((), "there is no such run at"), (("tracking=none",), "tracking=none asks no server")]
)
def test_a_run_that_mlflow_does_not_know_is_a_sentence(
    resumed: tuple[Path, str], more: tuple[str, ...], why: str
) -> None:
    done = trainer("+recipe=digits_lenet", f"resume={'ab' * 16}", "hydra.run.dir=none", *more, cwd=resumed[0])
    assert done.returncode == 2 and f"resume={'ab' * 16}: " in done.stderr and why in done.stderr
    assert "Traceback" not in done.stderr and not (resumed[0] / "none").exists()


@pytest.mark.parametrize("run_id", ["ab" * 16, "my/run", "x" * 300])
def test_an_id_that_mlflow_does_not_know_or_take_is_told_and_the_run_gets_its_own(
    run_id: str, resumed: tuple[Path, str]
) -> None:
    said: list[str] = []
    uri = f"sqlite:///{resumed[0] / 'mlflow.db'}"
    run = TrackedRun(str(resumed[0]), mlflow={"join": run_id, "uri": uri})
    assert reopened_run.joined(MlflowClient(uri), run, said.append) is None
    assert [line.startswith(f"MLFLOW_RUN_ID={run_id}: there is no such run at ") for line in said] == [True]
    assert run_lookup._fetch(uri, run_id) == {}
