"""What the parent hands to the processes is made without changing what it was made from, and survives JSON as it is."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.pictures import needs
from trainer.cli.arguments import typed_keys
from trainer.cli.compose import compose, hydra_app, plain
from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import CollectiveStrategy, DigitsData
from trainer.job.check import get_ready
from trainer.job.ready import Ready
from trainer.planning.auto import Machine, ModelFacts
from trainer.planning.launcher import Assignment
from trainer.planning.make_plan import make_plan
from trainer.planning.plan import Paths, Plan, Resume
from trainer.planning.validate import check

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "recipe").glob("*.yaml"))
MODEL, MACHINE = ModelFacts(1000, convolutional=True), Machine(2, frozenset(), ())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_checked_unchanged_and_reaches_the_processes_unchanged(recipe: str, tmp_path: Path) -> None:
    with hydra_app() as app:
        composed = plain(compose(app, [f"+recipe={recipe}", "launch.nproc=2", *needs(recipe, tmp_path)]))
    before = copy.deepcopy(composed)
    checked = check(composed)
    assert composed == before, "checking changes nothing"
    assert RunConfig.of(before).plain() == before
    config = copy.deepcopy(checked.config)
    plan = make_plan(checked, MODEL, MACHINE, Paths("run"))
    assert checked.config == config and make_plan(checked, MODEL, MACHINE, Paths("run")) == plan, (
        "planning changes nothing"
    )
    handed = Assignment(checked.config, plan, ("a.png",), ("s3cret",), ("torch",))
    assert Assignment.of(json.loads(json.dumps(handed.as_dict()))) == handed


def test_plan_and_its_parts_have_at_most_12_fields_and_cannot_be_changed() -> None:
    parts = [Plan, *(kind for kind in get_type_hints(Plan).values() if is_dataclass(kind))]
    assert len(parts) == 11
    for part in (*parts, Resume):
        assert len(fields(part)) <= 12 and part.__dataclass_params__.frozen, part  # type: ignore[union-attr]


def test_job_planned_again_is_the_job_of_that_command(tmp_path: Path) -> None:
    def ready(*overrides: str) -> Ready:
        with hydra_app() as app:
            typed = ["+recipe=digits_lenet", "launch.nproc=2", *overrides]
            return get_ready(plain(compose(app, typed)), typed_keys(typed), str(tmp_path))

    searching = ready("data.batch_size=auto")
    again, direct = searching.with_batch_size(18), ready("data.batch_size=18")
    assert again.plan == direct.plan and again.checked.config == direct.checked.config
    assert searching.plan.batches.size != 18, "the first one is as it was"
    moved = again.in_folder(tmp_path / "other")
    assert moved.plan == again.plan.changed(paths={"run_dir": f"{tmp_path}/other"})
    assert moved.with_facts(replace(again.checked.facts, slow=True)).plan.paths == moved.plan.paths


def test_keys_of_ones_own_stay_and_those_of_the_schema_are_typed() -> None:
    node = {"_target_": "mine.Data", "batch_size": 7, "samples": 3}
    config = RunConfig.of({"name": "x", "data": node, "model": {"_target_": "mine.Net", "hidden": 5}})
    assert config.data.batch_size == 7 and config.extra == {"data": {"samples": 3}}
    assert config.node("data")["samples"] == 3 and config.node("data")["_target_"] == "mine.Data"
    assert config.model == {"_target_": "mine.Net", "hidden": 5}
    other = config.changed(data={"batch_size": 9, "samples": 4}, seed=5)
    assert (other.batch_size, other.extra, other.seed) == (9, {"data": {"samples": 4}}, 5)
    assert config.data.batch_size == 7 and config.seed == 0, "the first one is as it was"
    digits = config.replaced("data", {"_target_": DigitsData._target_, "split_seed": 8})
    assert isinstance(digits.data, DigitsData) and digits.data.split_seed == 8 and not digits.extra


def test_nested_keys_are_typed_and_what_is_not_given_has_its_default() -> None:
    made = typed(CollectiveStrategy, {"gradient_merge": {"k_steps": 4}, "unknown": 1})
    assert (made.gradient_merge.k_steps, made.gradient_merge.avg, made.powersgd.rank) == (4, True, 1)


def test_an_assignment_and_its_plan_cannot_be_changed() -> None:
    with hydra_app() as app:
        checked = check(plain(compose(app, ["+recipe=digits_lenet"])))
    handed = Assignment(checked.config, make_plan(checked, MODEL, MACHINE, Paths("run")))
    for owner, name in (
        (handed, "config"),
        (handed.plan, "lr"),
        (handed.plan.chosen, "threads"),
        (handed.plan.data.facts, "kind"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(owner, name, None)
