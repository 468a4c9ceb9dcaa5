"""Every point reaches MLflow once, also through a server that is away; runs say what they were."""

from __future__ import annotations

import getpass
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mlflow_server import Server
from tests.pace import wait_for
from tests.pictures import config, image_folder
from tests.ports import ports
from tests.runs import ROOT, SMALL, mlflow_runs, points, read, script, start, trainer
from tests.tracking.test_resumed_points import described, following
from trainer.cli.sweep_pictures import PICTURES
from trainer.run_folder import tracking_file
from trainer.run_folder.tracking_file import Position
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import Follower
from trainer.tracking.mlflow_models import RunModels
from trainer.tracking.mlflow_tracker import MlflowTracker

RECORDER = "trainer.tracking.recorder"


@pytest.mark.all
def test_mlflow_holds_every_point_parameter_tag_and_artifact(tmp_path: Path) -> None:
    done = trainer(*SMALL, "hydra.run.dir=run", "+tracking.tags.team=vision", cwd=tmp_path, timeout=2400)
    assert done.returncode == 0, done.stderr
    [run] = mlflow_runs(tmp_path)
    result = read(tmp_path / "run" / "result.json")
    assert run.info.status == "FINISHED"
    assert run.info.run_id == result["run_id"]
    assert run.data.params["optimizer.lr"] == "0.05"
    assert run.data.params["data.batch_size"] == "32"
    tags = run.data.tags
    assert tags["trainer.strategy"] == "single"
    assert tags["trainer.world_size"] == "1"
    assert tags["trainer.data_source"] == "scikit-learn's handwritten digits"
    assert tags["trainer.stand_in"] == "no"
    assert tags["team"] == "vision"
    assert "trainer.torch" in tags and "trainer.device" in tags
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.name == "digits_lenet" and experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.info.run_name == "1ep log_every=20"
    assert tags["mlflow.user"] == getpass.getuser() and tags["mlflow.source.type"] == "LOCAL"
    assert tags["mlflow.source.name"] == "trainer digits_lenet"
    for name in ("train/loss", "train/acc1", "val/loss", "val/acc5", "perf/samples_per_s", "perf/data_wait", "lr"):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted(m.value for m in history) == sorted(points(tmp_path / "run", name)), name
    assert {"config.yaml", "plan.json", "workerlog.0", "curves.png"} <= {
        a.path for a in client.list_artifacts(run.info.run_id)
    }


def test_git_commit_and_dirty_are_tags(tmp_path: Path) -> None:
    from trainer.tracking import describe

    assert "mlflow.source.git.commit" in describe.git() or not (Path.cwd() / ".git").exists()
    assert describe.flat({"a": {"b": 1, "c": {"d": 2}}}) == [("a.b", 1), ("a.c.d", 2)]


@pytest.mark.all
def test_sweep_runs_are_children_of_one_parent(tmp_path: Path) -> None:
    done = trainer(
        "-m",
        *SMALL,
        "data.batch_size=16,32,64",
        "tracking.log_model=false",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
        timeout=2800,
    )
    assert done.returncode == 0, done.stderr
    runs = mlflow_runs(tmp_path)
    [parent] = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    sent = {one.path for one in client.list_artifacts(parent.info.run_id)}
    assert sent == {"sweep.csv", "report.html", *PICTURES}
    children = [r for r in runs if r is not parent]
    assert {c.data.tags["mlflow.parentRunId"] for c in children} == {parent.info.run_id}
    assert {c.data.params["data.batch_size"] for c in children} == {"16", "32", "64"}
    assert {r.info.status for r in runs} == {"FINISHED"}
    for number in range(3):
        assert read(tmp_path / "sweep" / str(number) / "result.json")["status"] == "done"
    assert {r.info.run_name for r in children} == {"b16", "b32", "b64"}
    assert parent.info.run_name == "sweep b16,32,64"
    found = {f"data.batch_size={2**n}": read(tmp_path / "sweep" / str(n - 4) / "result.json") for n in (4, 5, 6)}
    best = max(found, key=lambda swept: found[swept]["best"]["val/acc1"])
    note = parent.data.tags["mlflow.note.content"]
    assert f"`{best}`: val/acc1 {found[best]['best']['val/acc1']:.5f}**" in note and "3 done" in note
    for swept, result in found.items():
        [row] = [line for line in note.splitlines() if line.startswith("|") and swept in line]
        assert f"{result['metrics']['val/loss']:.4f}" in row and ("**" in row) == (swept == best)
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 4
    assert "data.batch_size=64" in done.stdout.split("Sweep")[-1]


@pytest.mark.all
def test_training_goes_on_without_the_tracking_server_and_points_are_sent_later(tmp_path: Path) -> None:
    server = Server(tmp_path)
    done = trainer(
        *SMALL,
        "hydra.run.dir=run",
        f"tracking.uri=http://127.0.0.1:{server.port}",
        "tracking.flush_timeout_s=1",
        "epochs=3",
        cwd=tmp_path,
    )
    run_dir = tmp_path / "run"
    assert done.returncode == 0, done.stderr
    assert "the tracking server does not answer" in done.stdout
    assert "recorder resend" in done.stdout
    assert read(run_dir / "result.json")["run_id"] is None
    try:
        server.start()
        resent = trainer("resend", str(run_dir), cwd=tmp_path, module=RECORDER)
        assert resent.returncode == 0, resent.stdout + resent.stderr
    finally:
        server.kill()
    [run] = mlflow_runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/acc1"] == pytest.approx(points(run_dir, "val/acc1")[-1])


@pytest.mark.all
def test_a_run_lives_through_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    server, run = Server(tmp_path).start(), tmp_path / "run"
    process = start(
        *SMALL,
        "epochs=100000",
        "hydra.run.dir=run",
        f"tracking.uri=http://127.0.0.1:{server.port}",
        "execution.val_every=0",
        "execution.log_every=1",
        "tracking.log_model=false",
        cwd=tmp_path,
    )
    try:
        wait_for(lambda: tracking_file.position(run).sent_bytes, 90, "points are sent")
        server.kill()
        there = len(points(run, "train/loss"))
        wait_for(lambda: "does not answer" in (tmp_path / "screen.txt").read_text(), 60, "the run says so")
        wait_for(lambda: len(points(run, "train/loss")) > there + 20, 60, "training goes on")
        server.start()
        wait_for(
            lambda: len(losses_until(run, tracking_file.position(run).sent_bytes)) > there + 20,
            60,
            "points are sent again",
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        server.kill()
    from mlflow import MlflowClient

    last = tracking_file.position(run)
    kept = sorted((m.step, m.value) for m in MlflowClient(server.store).get_metric_history(str(last.id), "train/loss"))
    sent = losses_until(run, last.sent_bytes)
    assert kept[: len(sent)] == sent and len(sent) > there + 20
    assert kept == losses_until(run, (run / "metrics.jsonl").stat().st_size)[: len(kept)], "none is there twice"


def losses_until(run: Path, size: int) -> list[tuple[int, float]]:
    """Step and ``train/loss`` of the lines in so many bytes of ``metrics.jsonl``."""
    lines = map(json.loads, (run / "metrics.jsonl").read_bytes()[:size].splitlines())
    return [(line["step"], line["metrics"]["train/loss"]) for line in lines if "train/loss" in line["metrics"]]


class _FlakyClient:
    """A tracking server that keeps whatever it is sent, twice if sent twice, and fails on chosen calls, before or after
    it has stored a batch or the first half of it."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        self.calls = 0
        self.stored: list[Any] = []
        self.batches: list[int] = []

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls += 1
        failure = self.failures.get(self.calls)
        if failure == "before":
            raise ConnectionError("away")
        self.batches.append(len(metrics))
        self.stored += metrics[: len(metrics) // 2] if failure == "half" else metrics
        if failure:
            raise ConnectionError("reply lost")

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        self.calls += 1
        if self.failures.get(self.calls) == "question":
            raise ConnectionError("away")
        return [m for m in self.stored if m.key == key]


def opened(folder: Path, client: Any, position: Position) -> Follower:
    """A follower whose run is open at the server."""
    resumed = position.sent_bytes > 0 or bool(client.stored)
    follower = following(described(folder, resumed=resumed), {"mlflow": position}, client)
    assert isinstance(follower.tracker, MlflowTracker)
    follower.tracker.run_id, follower.started = "r", True
    return follower


FAILURES: list[dict[int, str]] = [
    {},
    {1: "before"},
    {2: "after"},
    {1: "half"},
    {1: "before", 2: "after", 3: "question", 4: "half"},
    {1: "after", 2: "question", 3: "question"},
    {n: "half" for n in range(1, 12, 2)},
]


@pytest.mark.parametrize("failures", FAILURES, ids=str)
@pytest.mark.parametrize("restarted", [False, True], ids=["one process", "a new process each time"])
def test_every_point_arrives_once_whatever_fails(tmp_path: Path, failures: dict[int, str], restarted: bool) -> None:
    client = _FlakyClient(failures)
    follower = opened(tmp_path, client, Position("r"))

    def once() -> None:
        nonlocal follower
        follower.retry_at = 0.0
        follower.try_once()
        if restarted:  # as `resend` and a recorder that was killed find it
            follower = opened(tmp_path, client, tracking_file.position(tmp_path))

    written = []
    with (tmp_path / "metrics.jsonl").open("w", buffering=1) as file:
        for step in range(1500):
            values = {"a": step * 0.5, "b": float("nan") if step % 3 else float("inf"), "c": 0.1}
            file.write(json.dumps({"time": step, "step": step // 2, "epoch": 0, "metrics": values}) + "\n")
            written += [(k, step, step // 2, str(v)) for k, v in values.items()]
            if step % 700 == 0:
                once()
        file.write('{"time": 1, "half a li')
    for _ in range(20):
        once()
    assert sorted((m.key, m.timestamp, m.step, str(m.value)) for m in client.stored) == sorted(written)
    assert max(client.batches) <= 1000
    assert follower.position.sent_bytes == (tmp_path / "metrics.jsonl").read_text().rindex("\n") + 1


@pytest.mark.all
def test_a_server_killed_again_and_again_has_every_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server, killed by SIGKILL while points are sent to it, started again, and asked at the end."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # as in the recorder's process
    server = Server(tmp_path).start()
    uri = f"http://127.0.0.1:{server.port}"
    follower = following(described(tmp_path, uri=uri, opened="this one"), {}, None)
    written: list[tuple[str, int, int, float]] = []
    killed = 0
    try:
        with (tmp_path / "metrics.jsonl").open("w", buffering=1) as file:
            for turn in range(4):
                for step in range(turn * 1500, (turn + 1) * 1500):
                    values = {"a": step * 0.1, "b": 1.0 / (step + 1)}
                    file.write(json.dumps({"time": step, "step": step, "epoch": 0, "metrics": values}) + "\n")
                    written += [(k, step, step, v) for k, v in values.items()]
                if turn % 2:
                    server.start() if server.process is None else None
                    follower.retry_at = 0.0
                    follower.try_once()
                    assert not follower.position.error
                else:  # three batches take a while: the kill comes in the middle of one
                    timer = threading.Timer(0.05 + 0.1 * turn, server.kill)
                    timer.start()
                    while not follower.position.error:
                        follower.retry_at = 0.0
                        follower.try_once()
                        if not follower.position.error:
                            file.write(
                                json.dumps({"time": 0, "step": killed, "epoch": turn, "metrics": {"c": float(turn)}})
                                + "\n"
                            )
                            written.append(("c", 0, killed, float(turn)))
                            killed += 1
                    timer.join()
        answer = follower.finish("FINISHED", {"x": "y"}, 60.0)
        assert answer["unsent"] == 0 and not answer["error"]
    finally:
        server.kill()
    from mlflow import MlflowClient

    client = MlflowClient(server.store)
    [experiment] = [e for e in client.search_experiments() if e.name == "e"]
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.tags["x"] == "y"
    stored = [(k, m.timestamp, m.step, m.value) for k in "abc" for m in client.get_metric_history(found.info.run_id, k)]
    assert len(stored) == len(written) and sorted(stored) == sorted(written)


class _Opening:
    """A server whose answer to the first ``create_run`` is lost."""

    def __init__(self) -> None:
        self.runs: list[dict[str, str]] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0", tags={"mlflow.experimentKind": "chosen by somebody"})

    def create_run(self, experiment_id: str, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        self.runs.append(tags)
        raise ConnectionError("reply lost")

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        return [
            SimpleNamespace(info=SimpleNamespace(run_id="found"))
            for tags in self.runs
            if tags["trainer.opened"] in wanted
        ]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "found"


def test_a_run_whose_opening_was_not_answered_is_found_again(tmp_path: Path) -> None:
    client = _Opening()
    follower = following(described(tmp_path), {}, client)
    for _ in range(3):
        follower.retry_at = 0.0
        follower.try_once()
    assert follower.position.id == "found" and len(client.runs) == 1


SECRETS = {"model": "model-s3cret-1", "tag": "tag-s3cret-2", "uri": "uri-s3cret-3"}
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, hub_token):
        super().__init__()
        print("logging in with", hub_token)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))

    def forward(self, images):
        return self.layers(images)
"""
LOAD = """
import sys, numpy as np, mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(f"runs:/{sys.argv[2]}/{sys.argv[5]}")
with np.load(sys.argv[3]) as file:
    np.savez(sys.argv[4], outputs=model.predict(file["inputs"]))
print(model.metadata.signature)
print(model.input_example.shape)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server, Any]]:
    """A run with secrets in its model, its tags and its server's address; the folder, the server, and MLflow's run."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "own").mkdir()
    (folder / "own" / "own_net.py").write_text(OWN)
    server = Server(folder).start()
    try:
        done = trainer(
            *SMALL,
            "hydra.run.dir=run",
            f"tracking.uri=http://someone:{SECRETS['uri']}@127.0.0.1:{server.port}",
            "model._target_=own_net.Net",
            f"+model.hub_token={SECRETS['model']}",
            "~model.in_channels",
            "~model.image_size",
            f"+tracking.tags.api_key={SECRETS['tag']}",
            "+tracking.tags.team=vision",
            "tracking.system_every_s=0.05",
            "tracking.flush_timeout_s=200",
            "launch.nproc=2",
            cwd=folder,
            timeout=2800,
            PYTHONPATH=f"{ROOT}:{folder / 'own'}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "screen.txt").write_text(done.stdout + done.stderr)
        [run] = mlflow_runs(folder)
        yield folder, server, run
    finally:
        server.kill()


@pytest.mark.all
def test_no_secret_is_in_any_file_of_the_run_or_of_mlflow(told: tuple[Path, Server, Any]) -> None:
    folder, _, run = told
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {
        "config.yaml",
        "plan.json",
        "overrides.yaml",
        "hydra.yaml",
        "result.json",
        "tracking.json",
        "workerlog.0",
        "workerlog.1",
        "mlflow.db",
        "model.json",
        "screen.txt",
        "MLmodel",
    } <= names
    for path in files:
        content = path.read_bytes()
        for secret in SECRETS.values():
            if path.name == "screen.txt" and secret == SECRETS["model"]:
                continue  # the model's own class prints it, live, to the terminal of who typed it
            assert secret.encode() not in content, path
    assert "logging in with (hidden)" in (folder / "run" / "workerlog.0").read_text()
    assert run.data.params["model.hub_token"] == run.data.tags["api_key"] == "(hidden)"
    assert run.data.params["tracking.uri"].startswith("http://(hidden)@127.0.0.1:")
    assert run.data.tags["team"] == "vision"
    assert "+model.hub_token=(hidden)" in run.data.tags["mlflow.note.content"]


def test_the_logged_model_predicts_as_the_trained_one_without_the_run(
    told: tuple[Path, Server, Any], tmp_path: Path
) -> None:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from trainer.data.sets.digits import MEAN, STD, Digits
    from trainer.data.source import Facts

    folder, server, run = told
    val: Any = Digits(val_fraction=0.2, split_seed=0).open(Facts("", "", 1438, 359, (1, 8, 8), 10)).val
    state = load_file(folder / "run" / "model.safetensors")
    scores = ((val.inputs - MEAN[0]) / STD[0]).flatten(1) @ state["layers.1.weight"].T + state["layers.1.bias"]
    norm = (scores - state["layers.2.running_mean"]) / (state["layers.2.running_var"] + 1e-5).sqrt()
    scores = norm * state["layers.2.weight"] + state["layers.2.bias"]
    hits = (scores.argmax(1) == val.labels).double().mean().item()
    assert hits == pytest.approx(read(folder / "run" / "result.json")["metrics"]["val/acc1"], abs=1e-9)
    np.savez(tmp_path / "inputs.npz", inputs=val.inputs.numpy())
    (folder / "run").rename(folder / "elsewhere")
    try:
        where = (f"http://127.0.0.1:{server.port}", run.info.run_id)
        loaded = script(LOAD, *where, "inputs.npz", "outputs.npz", "digits_lenet", cwd=tmp_path)
    finally:
        (folder / "elsewhere").rename(folder / "run")
    assert loaded.returncode == 0, loaded.stderr
    torch.testing.assert_close(
        torch.from_numpy(np.load(tmp_path / "outputs.npz")["outputs"]), scores, atol=1e-5, rtol=1e-5
    )
    assert "Tensor('float32', (-1, 1, 8, 8))" in loaded.stdout and "Tensor('float32', (-1, 10))" in loaded.stdout
    assert "(1, 1, 8, 8)" in loaded.stdout


@pytest.mark.all
def test_the_logged_model_takes_images_as_they_are_and_finds_what_validation_found(tmp_path: Path) -> None:
    import numpy as np

    from trainer.config import schema
    from trainer.data.sets.image_folder import ImageFolder

    folder = image_folder(tmp_path / "images", per_class=8, val=6)
    done = trainer(
        "+recipe=resnet50_imagefolder",
        "model=convnet",
        "~model.zero_init_residual",
        f"data.root={folder}",
        "data.image_size=32",
        "data.batch_size=4",
        "epochs=2",
        "precision=fp32",
        "tracking.log_last_model=true",
        "hydra.run.dir=run",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    source = ImageFolder(**config(schema.ImageFolderData, root=str(folder), image_size=32, cache="none"))
    images, labels = source.open(source.facts(1)).val.augmented((0, 0), np.arange(18))
    np.savez(tmp_path / "inputs.npz", inputs=images.numpy())
    [run] = mlflow_runs(tmp_path)
    where = (f"sqlite:///{tmp_path}/mlflow.db", run.info.run_id)
    loaded = script(LOAD, *where, "inputs.npz", "outputs.npz", "resnet50_imagefolder-last", cwd=tmp_path)
    assert loaded.returncode == 0 and "Tensor('uint8', (-1, 3, 32, 32))" in loaded.stdout, loaded.stdout + loaded.stderr
    hits = (np.load(tmp_path / "outputs.npz")["outputs"].argmax(1) == labels.numpy()).mean()
    result = read(tmp_path / "run" / "result.json")
    found = result["metrics"]["val/acc1"]
    assert hits == pytest.approx(found, abs=1e-9) and found > 0.34
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    models = {model.name: model for model in client.search_logged_models([run.info.experiment_id])}
    best, last = models["resnet50_imagefolder"], models["resnet50_imagefolder-last"]
    assert (best.tags["trainer.which"], best.tags["trainer.step"]) == ("best", str(result["best_step"]))
    assert (last.tags["trainer.which"], last.tags["trainer.step"]) == ("last", str(result["steps"]))
    assert {m.value for m in best.metrics if m.key == "val/acc1"} == {result["best"]["val/acc1"]}
    assert {m.value for m in last.metrics if m.key == "val/acc1"} == {found}
    for name in ("val/acc1", "val/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted(m.value for m in history) == sorted(points(tmp_path / "run", name)), "none is there twice"


def test_the_run_says_what_it_was_on_what_and_how_to_repeat_it(told: tuple[Path, Server, Any]) -> None:
    folder, _, run = told
    note = run.data.tags["mlflow.note.content"]
    accuracy = read(folder / "run" / "result.json")["metrics"]["val/acc1"]
    for part in (
        "scikit-learn's handwritten digits",
        "collective, 2 workers",
        f"| val/acc1 | {accuracy:.5f} |",
        "python -m trainer +recipe=digits_lenet epochs=1",
    ):
        assert part in note
    first = note.partition("\n")[0]
    best = read(folder / "run" / "result.json")["best"]["val/acc1"]
    assert first.startswith(f"**digits_lenet: training done, best val/acc1 {best:.5f}"), "the page folds what follows"
    [data] = run.inputs.dataset_inputs
    assert data.dataset.name == "scikit-learn's handwritten digits" and len(data.dataset.digest) == 32
    assert json.loads(data.dataset.profile)["val_samples"] == 359
    assert data.tags[0].value == "training"


def test_the_hosts_load_is_measured_once_per_host(told: tuple[Path, Server, Any]) -> None:
    folder, _, run = told
    for name, most in (("cpu_percent", 100.0), ("memory_percent", 100.0), ("memory_used_mib", 1e9)):
        measured = points(folder / "run", f"system/0/{name}")
        assert measured and all(0.0 <= value <= most for value in measured)  # how many: the run's length decides
        assert f"system/0/{name}" in run.data.metrics
    assert not [name for name in run.data.metrics if name.startswith("system/1/")], "two workers, one host"


@pytest.mark.all
def test_hosts_carry_their_number(tmp_path: Path) -> None:
    """Two launchers on this machine stand for two hosts."""
    [port] = ports(1)
    argv = [
        *SMALL,
        "tracking=none",
        "launch.nnodes=2",
        f"launch.master_port={port}",
        "tracking.system_every_s=0.2",
        "epochs=6",
    ]
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
    hosts = [start(*argv, f"launch.node_rank={node}", "hydra.run.dir=run", cwd=tmp_path / str(node)) for node in (0, 1)]
    assert [host.wait(200) for host in hosts] == [0, 0]
    first = tmp_path / "0" / "run"
    assert points(first, "system/0/cpu_percent") and points(first, "system/1/cpu_percent")
    assert (
        not points(tmp_path / "1" / "run", "system/1/cpu_percent")
        if (tmp_path / "1" / "run" / "metrics.jsonl").exists()
        else True
    )


@pytest.mark.all
def test_what_can_be_switched_off_is_off(tmp_path: Path) -> None:
    done = trainer(
        *SMALL, "hydra.run.dir=run", "tracking.log_model=false", "tracking.system_every_s=null", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    [run] = mlflow_runs(tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.search_logged_models([run.info.experiment_id]) == []
    assert not [name for name in run.data.metrics if name.startswith("system/")]
    assert {"confusion.png", "per_class.csv", "mistakes.png", "curves.png"} <= {
        a.path for a in client.list_artifacts(run.info.run_id)
    }


def test_digest_changes_with_the_data_and_with_nothing_else(tmp_path: Path) -> None:
    from trainer.data.sets.digits import Digits
    from trainer.data.source import digest_of, listed

    def digest(**config: Any) -> str:
        source = Digits(val_fraction=0.2, split_seed=0, **config)
        return source.fingerprint(source.facts(32))

    assert digest() == digest(batch_size=8, num_workers=2) and len(digest()) <= 36
    other = Digits(val_fraction=0.2, split_seed=1)
    assert other.fingerprint(other.facts(32)) != digest()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"12")
    before = digest_of(listed(tmp_path))
    (tmp_path / "a" / "1.jpg").write_bytes(b"123")
    assert digest_of(listed(tmp_path)) != before and listed(tmp_path) == [("a/1.jpg", 3)]


@pytest.mark.all
def test_sending_everything_again_changes_nothing(told: tuple[Path, Server, Any]) -> None:
    """Also: the address is asked for, because its password is not kept."""
    from mlflow import MlflowClient

    folder, server, run = told
    client = MlflowClient(server.store)
    before = {name: len(client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics}
    asked = trainer("resend", str(folder / "run"), cwd=folder, module=RECORDER)
    assert asked.returncode == 2 and "MLFLOW_TRACKING_URI" in asked.stdout
    where = f"http://127.0.0.1:{server.port}"
    sent = trainer("resend", str(folder / "run"), cwd=folder, module=RECORDER, MLFLOW_TRACKING_URI=where)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert {name: len(client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics} == before
    assert sum(before.values()) == sum(
        len(json.loads(line)["metrics"]) for line in (folder / "run" / "metrics.jsonl").open()
    )
    [model] = client.search_logged_models([run.info.experiment_id])
    assert model.status == "READY" and len(client.get_run(run.info.run_id).outputs.model_outputs) == 1


def test_a_model_that_cannot_be_packed_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save

    from trainer.tracking import logged_model

    for name in ("model.json", "example.npz", "model.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes(save({}) if name == "model.safetensors" else b"")
    (tmp_path / "result.json").write_text('{"best_step": 0, "steps": 3}')
    monkeypatch.setattr(logged_model, "pack_model", lambda run_dir, choice: 1 / 0)
    said: list[str] = []
    RunModels(TrackedRun(str(tmp_path), mlflow={"models": {"best": "net"}}), None, said.append).send("r")
    assert said[0].startswith("the best model was not logged: ZeroDivisionError")


def test_a_model_whose_table_the_servers_keep_is_not_logged_and_that_is_said(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for name in ("model.json", "example.npz", "metrics.jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "result.json").write_text('{"best_step": 0, "steps": 3}')
    save_file({"bias": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"left_out": "embedding.weight"})
    said: list[str] = []
    RunModels(TrackedRun(str(tmp_path), mlflow={"models": {"best": "net"}}), None, said.append).pack()
    [line] = said
    where = "checkpoints/persistables has its rows (strategy.export_limit)"
    assert line == f"the best model is not logged: its file is without embedding.weight, and {where}"
