"""What the commands of a run on several hosts must have in common."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.test_assignment import MACHINE, MODEL
from trainer.cli.compose import compose, hydra_app, plain
from trainer.launch.terms import terms
from trainer.planning.launcher import Assignment
from trainer.planning.make_plan import make_plan
from trainer.planning.plan import Paths
from trainer.planning.validate import check

BASE = ("+recipe=wide_and_deep", "launch.servers=1", "launch.workers=2")
PICTURES = ("+recipe=resnet50_flowers",)


def told(*overrides: str) -> dict[str, Any]:
    with hydra_app() as app:
        checked = check(plain(compose(app, list(overrides))))
    plan = make_plan(checked, MODEL, MACHINE, Paths("run"))
    return terms(plan, checked.config, Assignment(checked.config, plan))


def differing(base: tuple[str, ...], override: str) -> set[str]:
    """As hosts compare them: what is not told is None."""
    mine, theirs = told(*base), told(*base, override)
    return {key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}


@pytest.mark.parametrize(
    "override",
    [
        "data.lease_batches=8",
        "data.work=static",
        "data.on_lost_worker=drop",
        "data.hash_size=1001",
        "checkpoint.every_epochs=2",
        "checkpoint.every_minutes=1",
        "checkpoint.background=false",
        "execution.val_every=2",
        "execution.log_every=7",
        "early_stop.patience=3",
        "best.metric=val/loss",
        "epochs=1",
        "strategy.lost_after_s=7",
        "compile=true",
        "seed=7",
    ],
)
def test_what_the_training_or_the_meetings_depend_on_is_the_same(override: str) -> None:
    assert override.partition("=")[0] in differing(BASE, override)


@pytest.mark.parametrize(
    "override", ["data.normalize=none", "data.flip=0.1", "data.augment=randaugment", "ema.decay=0.9"]
)
def test_so_is_what_pictures_become(override: str) -> None:
    assert override.partition("=")[0] in differing(PICTURES, override)


@pytest.mark.parametrize(
    ("base", "override"),
    [
        (BASE, "data.num_workers=3"),
        (BASE, "data.cache_dir=/elsewhere"),
        (BASE, "execution.threads=3"),
        (BASE, "tracking=none"),
        (BASE, "verbosity=quiet"),
        (BASE, "checkpoint.to=file:///copies"),
        (BASE, "name=other"),
        (PICTURES, "data.root=/elsewhere"),
        (PICTURES, "data.cache=none"),
        (PICTURES, "data.download=false"),
    ],
)
def test_places_screens_and_how_data_are_read_may_differ(base: tuple[str, ...], override: str) -> None:
    assert not differing(base, override)


def test_all_hosts_go_on_from_one_checkpoint_wherever_it_lies() -> None:
    with hydra_app() as app:
        checked = check(plain(compose(app, list(BASE))))
    plan = make_plan(checked, MODEL, MACHINE, Paths("run"))
    found = [
        terms(plan, checked.config, Assignment(checked.config, plan, resume=resume))["the checkpoint"]
        for resume in ("/a/checkpoints/step-000000007", "/b/step-000000007", "/a/checkpoints/step-000000009", "")
    ]
    assert found == ["step-000000007", "step-000000007", "step-000000009", "none"]
