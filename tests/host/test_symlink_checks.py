"""Nothing that a run writes lands where a link in its folder leads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainer as package
from tests.runs import SMALL
from trainer.errors import UserError
from trainer.host import files
from trainer.host.files import replace_file
from trainer.host.symlink_checks import check_run_folder
from trainer.pictures import figures
from trainer.run_folder.report import Report
from trainer.worker import example

pytestmark = pytest.mark.usefixtures("drawn")

NAMES = """
    workerlog.0 workerlog.3 serverlog.0 metrics.jsonl status.json result.json config.yaml plan.json classes.json
    checkpoints checkpoints/best.safetensors checkpoints/persistables/0 model.safetensors .hydra
    .hydra/config.yaml host.1 host.1/plan.json curves.png predictions.csv validation.last.npz trace.0.json.gz
    server.0.json example.npz skeleton.pkl model.json tracking.json sent.jsonl sweep.csv multirun.yaml
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_link_under_a_name_that_a_run_writes_is_found(tmp_path: Path, name: str) -> None:
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    check_run_folder(tmp_path / "run")
    link.symlink_to("../precious")
    with pytest.raises(UserError) as caught:
        check_run_folder(tmp_path / "run")
    said = (
        f"hydra.run.dir={tmp_path / 'run'}: has a link, {name} -> ../precious, and a run does not write through links. "
    )
    assert str(caught.value) == f"{said}Type instead: rm {link}, or hydra.run.dir=ANOTHER"


def test_everything_that_a_run_leaves_is_looked_for(tmp_path: Path) -> None:
    """The names of a real run; each would be found if it were a link."""
    package.run([*SMALL, "max_steps=2", "tracking=none", "profile=true", f"hydra.run.dir={tmp_path / 'run'}"])
    left = list((tmp_path / "run").iterdir())
    assert len(left) > 10
    for path in left:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
        with pytest.raises(UserError, match="has a link"):
            check_run_folder(tmp_path / "run")
        path.unlink()
        (tmp_path / "aside").rename(path)


@pytest.mark.parametrize(
    ("more", "link"),
    [
        (["hydra.run.dir=DIR"], "workerlog.0"),
        (["hydra.run.dir=DIR", "plan=true"], "status.json"),
        (["hydra.run.dir=DIR", "hydra.output_subdir=conf"], "conf"),
    ],
)
def test_run_into_a_folder_with_links_is_refused_and_writes_nothing(tmp_path: Path, more: list[str], link: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / link).symlink_to(precious)
    with pytest.raises(UserError, match="does not write through links"):
        package.run([*SMALL, "tracking=none", *(o.replace("DIR", str(run)) for o in more)])
    assert precious.read_text() == "mine" and list(run.iterdir()) == [run / link]


@pytest.mark.parametrize("link", ["0", "0/checkpoints", "0/.hydra", "sweep.csv", "multirun.yaml"])
def test_sweep_into_a_folder_with_links_is_refused_before_hydra_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.__main__ import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "sweep" / link).parent.mkdir(parents=True)
    (tmp_path / "sweep" / link).symlink_to(tmp_path / "precious")
    assert main(["-m", *SMALL, "seed=1,2", "tracking=none", "hydra.sweep.dir=sweep"]) == 2
    assert f"has a link, {link.removeprefix('0/')} -> {tmp_path}/precious" in capsys.readouterr().err
    assert list((tmp_path / "precious").iterdir()) == []


def test_links_of_other_names_are_the_users_own(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to("/usr")
    (tmp_path / "data").symlink_to("/usr")
    check_run_folder(tmp_path)
    check_run_folder(tmp_path / "not there")


def test_link_that_comes_while_the_run_works_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("status.json", "workerlog.1", "metrics.jsonl"):
        (tmp_path / name).symlink_to(precious)
    replace_file(tmp_path / "status.json", "{}")
    files.start_empty(tmp_path / "workerlog.1")
    Report(tmp_path, 1).close()
    assert precious.read_text() == "mine"
    assert json.loads((tmp_path / "status.json").read_text()) is not None
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


def test_a_link_planted_while_a_run_goes_on_is_replaced(tmp_path: Path) -> None:
    """Pictures and the kept example were written through it."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    for name in ("picture.png", "example.npz"):
        (run / name).symlink_to(precious)
    figures.save(figures.figure_of((2, 2), "title"), run / "picture.png")
    example.keep(run, {}, "fp32", SimpleNamespace(mean=None, std=None), torch.zeros(1, 2))  # type: ignore[arg-type]
    assert precious.read_text() == "mine"
    assert not any((run / name).is_symlink() for name in ("picture.png", "example.npz"))
