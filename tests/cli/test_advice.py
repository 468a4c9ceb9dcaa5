"""What is proposed to type instead of a value can be typed so in a shell, and is taken."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer
from tests.composed import ready
from trainer.cli.commands import check_same_folder, plain
from trainer.cli.compose import compose, hydra_app
from trainer.cli.explain import sentences
from trainer.cli.last_lines import _of_worker
from trainer.errors import UserError
from trainer.host.symlink_checks import check_run_folder
from trainer.optim.refused import SCHEDULES, TORCHS
from trainer.wording import override

DIGITS = ("+recipe=digits_lenet", "tracking=none", "launch.workers=1", "device=cpu")


def planned(*overrides: str) -> Any:
    return ready(*DIGITS, *overrides)


def advice(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        planned(*overrides)
    return refused.value.instead


@pytest.mark.parametrize(
    ("typed", "factors"),
    [
        ('optimizer.lr_factors={"*": 0.1}', {"*": 0.1}),
        ("optimizer.lr_factors={'features.*':0.1, \"classifier\": 2}", {"features.*": 0.1, "classifier": 2}),
        ("optimizer.lr_factors={*:0}", {"*": 0, "classifier": 1}),
        ("optimizer.lr_factors={clasifier:2}", {"classifier": 2}),
    ],
)
def test_mapping_of_factors_is_proposed_as_a_shell_and_hydra_take_it(typed: str, factors: dict[str, float]) -> None:
    [word] = shlex.split(advice(typed))
    assert planned(word).checked.config.optimizer["lr_factors"] == factors


def test_mapping_that_no_command_line_takes_is_for_a_file() -> None:
    said = advice("optimizer.lr_factors={features.[03].*: 0.1}")
    assert said == "a recipe with the line optimizer: {lr_factors: {features.[03].*: 0.1}}"


def test_text_with_quotes_inside_is_proposed_in_quotes_that_are_read() -> None:
    [word] = shlex.split(advice('name=a"b)c'))
    with hydra_app() as app:
        assert plain(compose(app, [*DIGITS, word]))["name"] == 'a"b)c'


def test_a_folder_with_a_space_is_proposed_as_one_word(tmp_path: Path) -> None:
    run = tmp_path / "it's my run" / "checkpoints" / "step-000000001"
    run.mkdir(parents=True)
    (run / "checkpoint.json").touch()
    (tmp_path / "it's my run" / "plan.json").touch()
    with hydra_app() as app, pytest.raises(UserError) as refused:
        check_same_folder(compose(app, [*DIGITS, "resume=auto"]), "hydra.run.dir", tmp_path / "TIME")
    [word, auto] = shlex.split(refused.value.instead)
    with hydra_app() as app:
        assert compose(app, [*DIGITS, word, auto]).hydra.run.dir == str(tmp_path / "it's my run")
    weights = override("weights", str(tmp_path / "it's my run"))
    with hydra_app() as app, pytest.raises(UserError) as refused, sentences(app, ["mode=eval", weights]):
        compose(app, ["mode=eval", weights])
    assert shlex.split(refused.value.instead)[3:] == ["eval", str(tmp_path / "it's my run")]
    (link := tmp_path / "it's my run" / "result.json").symlink_to("elsewhere")
    with pytest.raises(UserError) as refused:
        check_run_folder(tmp_path / "it's my run")
    assert shlex.split(refused.value.instead)[:2] == ["rm", f"{link},"]


@pytest.mark.all
@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (["tracking=mlflow", "tracking.tags={a: b c, d: 'e'}"], {"a": "b c", "d": "e"}),
        (["tracking=mlflow", "tracking.tags.a=b c"], {"a": "b c"}),
    ],
)
def test_entries_of_a_mapping_are_proposed_with_a_plus(typed: list[str], taken: dict[str, str]) -> None:
    with hydra_app() as app, pytest.raises(UserError) as refused, sentences(app, [*DIGITS[:1], *typed]):
        compose(app, [*DIGITS[:1], *typed])
    [word] = shlex.split(refused.value.instead)
    assert word.startswith("+") and planned("tracking=mlflow", word).checked.config.tracking.tags == taken


def test_a_value_from_elsewhere_is_proposed_in_quotes() -> None:
    with hydra_app() as app, pytest.raises(UserError) as refused, sentences(app, [*DIGITS, "epochs=${oc.env:NOPE}"]):
        plain(compose(app, [*DIGITS, "epochs=${oc.env:NOPE}"]))
    assert refused.value.instead == "'epochs=${oc.env:NOPE,DEFAULT}'", "a shell would look for a variable of its own"


ARGUMENTS = {
    "step_size": 3,
    "gamma": 0.5,
    "milestones": "[2,4]",
    "power": 2,
    "pct_start": 0.2,
    "factor": 0.5,
    "patience": 2,
    "cooldown": 1,
    "total_iters": 7,
    "start_factor": 0.25,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_option_that_is_proposed_for_a_schedule_of_torchs_is_taken_with_its_values(name: str) -> None:
    given = [f"+scheduler.{key}={ARGUMENTS[key]}" for key in SCHEDULES[name][1]]
    node = planned(*advice(f"scheduler._target_={TORCHS}{name}", *given).split()).checked.config.node("scheduler")
    for key, own in SCHEDULES[name][1].items():
        assert str(node[own]).replace(" ", "").replace(".0", "") == str(ARGUMENTS[key])


def test_resume_auto_in_a_folder_of_its_own_proposes_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command would begin a new run, for ever."""
    monkeypatch.chdir(tmp_path)
    run = (*DIGITS, "limit_train_batches=2", "limit_val_batches=1", "max_steps=2", "verbosity=quiet")
    trainer.run([*run, "hydra.run.dir=outputs/digits_lenet/2026-01-02_03-04-05"])
    with pytest.raises(UserError) as refused:
        trainer.run([*run, "resume=auto"])
    assert refused.value.instead == "hydra.run.dir=outputs/digits_lenet/2026-01-02_03-04-05 resume=auto"
    assert [path.name for path in Path("outputs/digits_lenet").iterdir()] == ["2026-01-02_03-04-05"]
    with (
        hydra_app() as app,
        pytest.raises(UserError, match=r"hydra\.sweep\.dir=multirun/digits_lenet/NAME resume=auto"),
    ):
        check_same_folder(compose(app, [*run, "resume=auto"]), "hydra.sweep.dir", Path("multirun/digits_lenet/TIME"))


def test_updates_of_a_worker_that_got_more_work_say_how_many_each_was_to_do() -> None:
    plan: Any = SimpleNamespace(
        updates_of=" of worker 0", topology=SimpleNamespace(workers=2), length=SimpleNamespace(total_steps=40)
    )
    result: Any = SimpleNamespace(ended="all updates done")
    assert _of_worker(plan, result) == " of worker 0 (40 per worker on average: whoever is faster gets more work)"
    assert _of_worker(SimpleNamespace(updates_of="", workers=2, total_steps=40), result) == ""  # type: ignore[arg-type]
    assert _of_worker(plan, SimpleNamespace(ended="early stop at update 9")) == " of worker 0"  # type: ignore[arg-type]
