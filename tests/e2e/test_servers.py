"""Runs with parameter servers from the command line: what they learn, leave, and start from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runs import mlflow_runs, points, read, trainer
from trainer.errors import UserError
from trainer.models.wide_and_deep import WideAndDeep
from trainer.weights import fit

CLICKS = (
    "+recipe=wide_and_deep",
    "tracking=none",
    "data.train_rows=20000",
    "data.val_rows=4000",
    "data.hash_size=30011",
    "data.batch_size=200",
    "execution.log_every=10",
    "hydra.run.dir=run",
    "model.hidden=[32]",
    "scheduler.warmup_steps=0",
)
"""A small run of the recipe."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 2 servers, in step."""
    folder = tmp_path_factory.mktemp("saved")
    tracked = [a for a in CLICKS if a != "tracking=none"]
    done = trainer(
        *tracked, "strategy=pserver_sync", "launch.servers=2", "launch.workers=2", "epochs=2", cwd=folder, pictures=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "screen.txt").write_text(done.stdout)
    return folder / "run"


@pytest.mark.all
def test_run_leaves_what_servers_did_and_all_that_they_kept(saved: Path) -> None:
    persistables = saved / "checkpoints" / "persistables"
    assert sorted(p.name for p in persistables.iterdir()) == [
        "COMPLETE",
        "index.json",
        "server-0.safetensors",
        "server-1.safetensors",
    ]
    for number in range(2):
        told = read(saved / f"server.{number}.json")
        assert told["pushes"] == told["version"] * 2 == 2 * 2 * (20000 // 400) and told["rows"] > 0
        assert "listens at" in (saved / f"serverlog.{number}").read_text()
    assert points(saved, "server1/pushes_per_s") and points(saved, "server0/rows")
    assert (saved / "servers.png").stat().st_size
    assert read(saved / "result.json")["metrics"]["val/auc"] > 0.6
    screen = " ".join((saved.parent / "screen.txt").read_text().split())
    assert "(curves.png, servers.png, model.safetensors, result.json, workerlog.N, serverlog.N)" in screen
    assert not (saved / "confusion.png").exists()
    assert not list(saved.rglob("ledger*")), "strategy.ledger=true was not asked for"


def test_mlflow_holds_what_each_server_did(saved: Path) -> None:
    from mlflow import MlflowClient

    [run] = mlflow_runs(saved.parent)
    client = MlflowClient(f"sqlite:///{saved.parent / 'mlflow.db'}")
    for name in ("pushes_per_s", "pulls_per_s", "mb_per_s", "queue", "waiting", "rows"):
        for server in range(2):
            told = points(saved, f"server{server}/{name}")
            history = client.get_metric_history(run.info.run_id, f"server{server}/{name}")
            assert told and sorted(m.value for m in history) == sorted(told), name
    assert run.data.metrics["server1/rows"] > 0 and max(points(saved, "server0/pushes_per_s")) > 0
    assert {"server.0.json", "serverlog.1", "servers.png"} <= {a.path for a in client.list_artifacts(run.info.run_id)}


def test_saved_model_is_a_plain_one_with_all_rows(saved: Path, tmp_path: Path) -> None:
    plain = ("mode=eval", f"weights={saved}")
    done = trainer(*CLICKS, *plain, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    before, now = (read(run / "result.json")["metrics"] for run in (saved, tmp_path / "run"))
    for name in ("val/auc", "val/loss"):
        assert now[name] == pytest.approx(before[name], abs=1e-6), name


@pytest.mark.all
def test_tables_above_the_limit_are_left_out_of_the_saved_model(tmp_path: Path) -> None:
    done = trainer(*CLICKS, "max_steps=2", "launch.workers=1", "strategy.export_limit=1000", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is left out of model.safetensors (strategy.export_limit)" in (tmp_path / "run" / "workerlog.0").read_text()
    whole, cut = 30011, {n: t.shape for n, t in load_file(tmp_path / "run" / "model.safetensors").items()}
    assert cut and all(whole not in shape for shape in cut.values())
    persistables = tmp_path / "run" / "checkpoints" / "persistables"
    assert any(n.endswith("ids") for n in load_file(persistables / "server-0.safetensors"))
    done = trainer(*CLICKS, "mode=eval", f"weights={tmp_path}/run", "hydra.run.dir=second", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.all
@pytest.mark.parametrize(("mode", "servers", "workers"), [("sync", 3, 1), ("async", 1, 2)])
def test_any_number_of_servers_starts_from_what_was_saved(
    saved: Path, tmp_path: Path, mode: str, servers: int, workers: int
) -> None:
    done = trainer(
        *CLICKS,
        f"strategy=pserver_{mode}",
        f"launch.servers={servers}",
        f"launch.workers={workers}",
        "max_steps=1",
        f"strategy.load_from={saved}/checkpoints/persistables",
        "optimizer.lr=1e-12",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, now = (read(run / "result.json")["metrics"] for run in (saved, tmp_path / "run"))
    for name in ("val/loss", "val/auc", "val/mae"):
        assert now[name] == pytest.approx(before[name], abs=1e-5), name


@pytest.mark.all
def test_incomplete_or_cut_persistables_are_refused_before_anything_starts(saved: Path, tmp_path: Path) -> None:
    whole = saved / "checkpoints" / "persistables"
    ways = {"COMPLETE": "without", "server-1.safetensors": "cut"}
    for name, how in ways.items():
        copy = shutil.copytree(whole, tmp_path / name)
        if how == "cut":
            (copy / name).write_bytes((copy / name).read_bytes()[:-10])
        else:
            (copy / name).unlink()
        done = trainer(*CLICKS, f"strategy.load_from={copy}", cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        said = done.stdout + done.stderr
        assert "strategy.load_from" in said and name in said and "Traceback" not in said
        assert not (tmp_path / "run").exists()


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "extra"),
    [
        ("async", ("strategy.wire=int8", "strategy.transport=tcp")),
        ("ssp", ("strategy.staleness=2", "strategy.delay_compensation=0.04")),
        ("geo", ("strategy.k_steps=20", "launch.workers=3")),
        (
            "async",
            (
                "data.hash_size=null",
                "model.table_size=null",
                "data.cache=false",
                "data.block_mib=1",
                "strategy.entry.count=2",
                "strategy.wire=bf16",
            ),
        ),
    ],
    ids=["int8 over tcp", "ssp", "geo", "unbounded, streamed, admitted, bf16"],
)
def test_every_mode_learns(tmp_path: Path, mode: str, extra: tuple[str, ...]) -> None:
    done = trainer(*CLICKS, f"strategy=pserver_{mode}", "epochs=3", *extra, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read(tmp_path / "run" / "result.json")
    assert result["metrics"]["val/auc"] > 0.65
    summary = rf"done {result['steps']} updates of worker 0( \([^)]*\))?, {result['samples']} samples"
    assert re.search(summary, " ".join(done.stdout.split()))
    told = read(tmp_path / "run" / "server.0.json")
    assert told["endpoint"].startswith("tcp://127.0.0.1:" if "strategy.transport=tcp" in extra else "ipc:")
    assert sum(told["staleness"].values()) == told["pushes"] or mode == "geo"
    tensors, unbounded = load_file(tmp_path / "run" / "model.safetensors"), "model.table_size=null" in extra
    assert ("embedding.weight" in tensors) != unbounded and all(map(len, tensors.values())), "no empty table is saved"
    if unbounded:
        with pytest.raises(
            UserError, match=r"the run left the table embedding\.weight out of it \(strategy\.export_limit\)"
        ):
            fit.load(tmp_path / "run" / "checkpoints" / "best.safetensors", WideAndDeep(100, hidden=[32]))
    if mode == "ssp":  # with 2 workers: own steps since the pull, and at most 2 * bound + 1 of the other's
        assert max(map(int, told["staleness"])) <= 2 * 2 + 1


@pytest.mark.all
def test_image_recipes_run_on_servers_as_well(tmp_path: Path) -> None:
    done = trainer(
        "+recipe=resnet50_flowers_demo",
        "model=convnet",
        "~model.zero_init_residual",
        "data.image_size=32",
        "data.per_class=1",
        "strategy=pserver_async",
        "tracking=none",
        "hydra.run.dir=run",
        "epochs=1",
        "limit_train_batches=3",
        "limit_val_batches=1",
        "data.batch_size=4",
        "execution.log_every=1",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "roles 1 server, 2 workers" in " ".join(done.stdout.split())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < p["metrics"]["train/loss"] < 20 for p in lines if "train/loss" in p["metrics"])
    assert read(tmp_path / "run" / "server.0.json")["pushes"] == 6  # a limit is each worker's
