"""A queued run trains what was checked at its submission, and says where its code has changed since."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.runs import trainer
from tests.service.test_runner import begun, steps, until
from trainer.cli import compose, queue_verbs
from trainer.host.code_version import code_version
from trainer.service.queue import CANCEL, HERE, OVER, RUNNING, Queue, Slots
from trainer.service.runner import Runner
from trainer.service.slots import of_this_host

RECIPE = """# @package _global_
defaults:
  - /recipe/digits_lenet
  - _self_
epochs: 1
limit_train_batches: 2
"""


@pytest.mark.parametrize("more", [(), ("tracking=none", "optimizer.lr=1e-7", r"name=a\${b}", "seed=${epochs}")])
def test_a_thawed_config_is_the_frozen_one(more: tuple[str, ...], tmp_path: Path) -> None:
    with compose.hydra_app() as app:
        config = compose.compose(app, ["+recipe=digits_lenet", *more])
        before = compose.plain(config)
        file = tmp_path / "config"
        file.write_text(compose.frozen(config))
        after = compose.thawed(file, "/a folder/${x}", "auto")
    plain = compose.plain(after)
    assert plain.pop("resume")["path"] == "auto" and before.pop("resume")["path"] is None
    assert plain == before and compose.named_folder(after, "hydra.run.dir") == Path("/a folder/${x}")


def test_a_retry_of_a_run_that_began_from_a_checkpoint_begins_there_again(tmp_path: Path) -> None:
    file = tmp_path / "config"
    with compose.hydra_app() as app:
        for typed, path in ((), "fresh"), (("resume=before",), "before"):
            file.write_text(compose.frozen(compose.compose(app, ["+recipe=digits_lenet", *typed])))
            assert compose.thawed(file, str(tmp_path), "fresh").resume.path == path


@pytest.mark.all
def test_what_is_edited_after_the_submission_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is edited, then its folder is removed; of a sweep as well. Only the code's change is said."""
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    recipe = tmp_path / "conf" / "recipe" / "own.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    for words in (("add", "conf"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    words = ("--config-dir", "conf", "+recipe=own", "tracking=none", "launch.runner=false")
    assert trainer("submit", *words, "hydra.run.dir=one", cwd=tmp_path).returncode == 0
    sweep = ("-m", *words, "seed=1,2", "hydra.sweep.dir=sweep")
    assert trainer("submit", *sweep, cwd=tmp_path).returncode == 0
    recipe.write_text("epochs: [")
    queue = Queue(tmp_path / "home")
    runner = Runner(queue, of_this_host())
    while (runs := queue.newest(9)) and not all(run.state in OVER for run in runs):
        runner.turn()
    for run in runs:
        assert (run.state, run.code) == ("done", 0), Path(run.log).read_text()
        config = yaml.safe_load(Path(run.folder, "config.yaml").read_text())
        assert config["epochs"] == 1 and config["limit_train_batches"] == 2
    assert json.loads((tmp_path / "one" / "result.json").read_text())["steps"] == 2
    assert "ATTENTION: submitted with other code" in Path(runs[0].log).read_text()
    assert "OTHER CODE" in trainer("show", "one", cwd=tmp_path).stdout
    queue.close()


def test_code_is_the_same_until_it_changes(tmp_path: Path) -> None:
    outside = code_version(str(tmp_path))
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    (tmp_path / "model.py").write_text("one")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"], cwd=tmp_path, check=True
    )
    committed = code_version(str(tmp_path))
    (tmp_path / "results.csv").write_text("no code")
    (tmp_path / "below").mkdir()
    assert committed == code_version(str(tmp_path / "below")) != outside
    (tmp_path / "model.py").write_text("two")
    changed = code_version(str(tmp_path))
    (tmp_path / "other.py").write_text("one")
    more = code_version(str(tmp_path))
    (tmp_path / "other.py").write_text("two")
    assert len({committed, changed, more, code_version(str(tmp_path))}) == 4


@pytest.mark.parametrize("verbs", [("resume", "retry"), ("retry", "resume")])
def test_a_retry_begins_anew_and_a_resume_goes_on(
    verbs: tuple[str, str], queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.service.engine.start_runner", lambda folder: None)
    runner = Runner(queue, Slots((0,), (), 1 << 40), HERE)
    run = until(queue, runner, add("work", 30), (RUNNING,))
    begun(run)
    queue.move(run.number, (RUNNING,), asked=CANCEL)
    until(queue, runner, run.number, OVER)
    for verb in verbs:
        ended = queue.run(run.number)
        assert ended is not None and "queued again" in queue_verbs.done(queue, verb, ended)
        run = until(queue, runner, run.number, OVER)
        assert run.state == "done"
    began_at = dict(zip(("submit", *verbs), (int(line.split()[0]) for line in steps(run)), strict=True))
    assert began_at["submit"] == began_at["retry"] == 0 < began_at["resume"]
