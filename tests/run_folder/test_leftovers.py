"""A run into a folder that another run has left: nothing of the old run remains, nothing that is read is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainer as package
from tests.runs import SMALL
from trainer.__main__ import main
from trainer.run_folder.leftovers import check_reads, clear

NAMES = (
    "metrics.jsonl",
    "result.json",
    "status.json",
    "status.1.json",
    "tracking.json",
    "sent.jsonl",
    "lives.json",
    "curves.png",
    "servers.png",
    "plan.json",
    "model.safetensors",
    "model_ema.safetensors",
    "model.json",
    "example.npz",
    "skeleton.pkl",
    "classes.json",
    "config.yaml",
    "workerlog.0",
    "workerlog.12",
    "serverlog.0",
    "server.1.json",
    "profile.0.json",
    "trace.0.json.gz",
    "predictions.csv",
    "confusion.png",
    "best_confusion.png",
    "per_class.csv",
    "mistakes.png",
    "best_mistakes.csv",
    "validation.last.npz",
    "checkpoints/best.safetensors",
    "checkpoints/persistables/server-0.safetensors",
    "checkpoints/persistables/COMPLETE",
    "checkpoints/persistables/index.json",
    "checkpoints/persistables.partial/server-1.seal",
    "host.2/plan.json",
    "checkpoints/step-000000010/COMPLETE",
    "checkpoints/step-000000020.partial/server-1.safetensors.failed",
    "checkpoints/step-000000020.0123456789abcdef.partial/.tmpc8kbXk",
    "checkpoints/step-000000020/full-0.safetensors",
    "checkpoints/latest",
    ".model.safetensors.123-0123abcd",
    ".status.json.9-ffffffff",
    "checkpoints/.best.safetensors.77-00000000",
)
KEPT = (
    "notes.txt",
    "data/train/result.json",
    "cache/model.safetensors",
    "0/result.json",
    "workerlog.txt",
    "model2.safetensors",
    "checkpoints/mine.safetensors",
    "checkpoints/persistables.old/COMPLETE",
    "host.1/plan.json",
    "best.json",
    ".notes.txt.123-0123abcd",
    ".model.safetensors",
    ".status.json.9-x",
)


def files(folder: Path) -> set[str]:
    """All files below."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_names_of_a_run_go_and_no_others(tmp_path: Path) -> None:
    for name in (*NAMES, *KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    assert clear(tmp_path, hosts=2)
    assert files(tmp_path) == set(KEPT) and not (tmp_path / "host.2").exists()
    assert not clear(tmp_path, hosts=2) and clear(tmp_path / "host.1")


def test_no_link_is_followed(tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    (precious / "persistables").mkdir(parents=True)
    run.mkdir()
    for name in ("best.safetensors", "persistables/COMPLETE", "plan.json"):
        (precious / name).write_text("mine")
    (run / "checkpoints").symlink_to(precious)
    (run / "host.3").symlink_to(precious)
    (run / "model.safetensors").symlink_to(precious / "best.safetensors")
    assert clear(run, hosts=1)
    assert files(precious) == {"best.safetensors", "persistables/COMPLETE", "plan.json"}


def test_a_second_run_that_fails_claims_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = [*SMALL, "max_steps=2", "tracking=none", "profile=true", "hydra.run.dir=old"]
    assert package.run(typed).status == "done"
    assert "written over" not in capsys.readouterr().out
    assert (tmp_path / "old" / "model.safetensors").is_file()
    assert {name for name in files(tmp_path / "old") if not name.startswith(".hydra/")} != set()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    assert main([*typed, "optimizer.lr=1e30", "execution.log_every=1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count(f"written over: the run that was in {tmp_path / 'old'}") == 1
    left = next(line for line in shown.splitlines() if line.startswith("left"))
    assert "model.safetensors" not in left
    assert "old/model.safetensors" not in {f"old/{name}" for name in files(tmp_path / "old")}
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"
    clear(tmp_path / "old", hosts=1)  # every name of a real run is known
    assert {name for name in files(tmp_path / "old") if not name.startswith(".hydra/")} == {"notes.txt", ".lock"}


@pytest.mark.parametrize(
    "inside", ["model.safetensors", "checkpoints/best.safetensors", "checkpoints/persistables", "checkpoints"]
)
def test_what_the_run_reads_is_not_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old" / inside
    (path if "." not in path.name else path.parent).mkdir(parents=True)
    if "." in path.name:
        path.write_text("weights")
    before = files(tmp_path)
    asked = [
        *SMALL,
        "tracking=none",
        "hydra.run.dir=old",
        f"callbacks=[{{_target_: tests.e2e.own_callbacks.Recorder, stop_at: old/{inside}}}]",
    ]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert f"callbacks[0].stop_at=old/{inside}: lies in the run's own folder " in said
    assert "which is written anew. Type instead: hydra.run.dir=ANOTHER" in said
    assert files(tmp_path) == before


def test_places_that_no_run_clears_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.errors import UserError

    monkeypatch.chdir(tmp_path)
    for name in ("data", "1/checkpoints/persistables.previous", "0"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "predictions.csv").write_text("old")
    (tmp_path / "link").symlink_to("run/predictions.csv")
    check_reads(
        {"data": {"path": "run/data"}, "name": "run", "predict": {"output": "run/predictions.csv"}},
        tmp_path / "run",
        "hydra.run.dir",
    )
    with pytest.raises(UserError, match=r"data\.path=link: lies in"):
        check_reads({"data": {"path": "link"}}, tmp_path / "run", "hydra.run.dir")
    load_from = {"strategy": {"load_from": "run/1/checkpoints/persistables"}}
    check_reads(load_from, tmp_path / "run", "hydra.run.dir")
    with pytest.raises(UserError, match=r"Type instead: hydra\.sweep\.dir=ANOTHER"):
        check_reads(load_from, tmp_path / "run", "hydra.sweep.dir")
    with pytest.raises(UserError, match=r"strategy\.load_from=run/1/checkpoints/persistables: lies in"):
        check_reads(load_from, tmp_path / "run" / "1", "hydra.run.dir")
