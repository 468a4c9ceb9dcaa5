"""All that a checkpoint holds, and every key that it depends on: what a changed key spoils is refused, or begins anew
and is listed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer
from tests.strategies.launching import composed
from trainer.checkpoint import store, tensor_tree
from trainer.config.keys import Key, sections
from trainer.errors import UserError
from trainer.planning.plan import Resume
from trainer.planning.resume_changes import (
    Measures,
    changed_states,
    changes,
    check_ages,
    completed,
    moved,
    places_before,
)

COUNTING = "tests.planning.counting"
CALLBACKS = f"callbacks=[{{_target_:{COUNTING}.Counting,begin:5}},{{_target_:{COUNTING}.Another}}]"
RUN = (
    *"""
        model=lenet model.image_size=8 data=digits data.batch_size=16 limit_train_batches=4
        limit_val_batches=1 max_steps=6 optimizer=momentum optimizer.lr=0.05 optimizer.weight_decay=0.0
        scheduler=plateau scheduler.metric=val/loss early_stop.metric=val/loss early_stop.patience=50
        ema.decay=0.9 seed=3 precision=fp32 device=cpu tracking=none execution.threads=1
        execution.val_every_steps=2 checkpoint.every_steps=1 checkpoint.keep_last=100
        checkpoint.background=false verbosity=quiet
    """.split(),
    CALLBACKS,
)
AT = 5
"""After an update inside the second epoch."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with everything that remembers something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("changed"))
        trainer.run([*RUN, "hydra.run.dir=run"])
        yield folder / "run" / "checkpoints" / f"step-{AT:09d}"


def resumed(checkpoint: Path, *changed: str) -> Resume:
    keys = {override.partition("=")[0] for override in changed}
    kept = [o for o in RUN if o.partition("=")[0] not in keys and o.partition(".")[0] not in keys]  # of another option
    ready = composed(*kept, *changed, f"resume.path={checkpoint}", "resume.allow_changes=true")
    assert ready.plan.resume is not None
    return ready.plan.resume


ALL = "all 6 parameters"


@dataclass(frozen=True)
class Changed:
    """Keys that are changed, and what the plan lists of it, or the refusal has."""

    keys: tuple[str, ...]
    said: str
    refused: bool = False


def c(*keys: str, said: str) -> Changed:
    return Changed(keys, said)


def refused(*keys: str, said: str) -> Changed:
    return Changed(keys, said, True)


BEST = (
    c(
        "best.metric=val/loss",
        said="the best model so far: begins anew with val/loss, because best.metric was val/acc1",
    ),
    c(
        "loss.label_smoothing=0.1",
        "best.metric=val/acc1",
        said=(
            "the early stop's best value and the validations waited: begins anew with val/loss, because loss is "
            "another one"
        ),
    ),
    c(
        "data.val_fraction=0.3",
        said="the best model so far: begins anew with val/acc1, because data.val_fraction was 0.2",
    ),
    c("limit_val_batches=2", said="the best model so far: begins anew with val/acc1, because limit_val_batches was 1"),
)
ORDER = (
    c("seed=4", said="the order of epoch 1: after seed was changed"),
    c("sampler.shuffle=false", said="the order of epoch 1: after sampler.shuffle was changed"),
    c("limit_train_batches=5", said="the order of epoch 1: after limit_train_batches was changed"),
    refused("data.batch_size=8", said="an update has 8 samples, and had 16"),
)
STATES: dict[str, tuple[Changed, ...] | str] = {
    "progress": ORDER,
    "model": (refused("model.num_classes=12", said="and this run's model has it as"),),
    "ema": (c("ema.decay=null", said="the moving average of the weights, which ema.decay=null does not need"),),
    "buffers": "those of the model, whose parameters are compared",
    "averaged_buffers": "those of the model",
    "own": "tests/strategies has those of each strategy",
    "window": "sums of batches that were trained on, whatever comes",
    "batches": "batches that were trained on, whatever comes",
    "randomness": (c("seed=4", said="the seed of the random generators: they go on as they were"),),
    "report": BEST,
    "early_stop": (
        c(
            "early_stop.metric=val/acc1",
            said=(
                "the early stop's best value and the validations waited: begins anew with val/acc1, because "
                "early_stop.metric was val/loss"
            ),
        ),
        *BEST[1:2],
    ),
    "callbacks": (
        c(
            f"callbacks=[{{_target_:{COUNTING}.Another}}]",
            said=f"the state of callbacks[0] ({COUNTING}.Counting), which this run does not have",
        ),
        c(
            f"callbacks=[{{_target_:{COUNTING}.Counting,begin:7}},{{_target_:{COUNTING}.Another}}]",
            said=f"callbacks[0] ({COUNTING}.Counting): goes on with the state that it had under its old arguments",
        ),
    ),
    "strategy.updater.steps": "the number of updates, on which schedules go on",
    "strategy.updater.kind": (
        c(
            "optimizer=adam",
            said=f"exp_avg, exp_avg_sq and step of {ALL}: begins anew, because the checkpoint is of SGD",
        ),
    ),
    "strategy.updater.optimizer": (
        c("optimizer.momentum=0", said=f"momentum_buffer of {ALL}, which the optimizer does not need now"),
        c("optimizer.lr_factors={features.*:0}", said="the optimizer's state of features.0.weight, features.0.bias, "),
    ),
    "strategy.updater.names": (c("optimizer.lr_factors={features.*:0}", said="which is not trained any more"),),
    "strategy.updater.made_with": (
        "settings of the config, of which the changed ones count (tests/optim/test_state_transfer.py)"
    ),
    "strategy.updater.scaler": (
        c("precision=fp16", said="precision=fp16 needs a loss scale, and the checkpoint has none"),
    ),
    "strategy.updater.plateau": (
        c(
            "scheduler.metric=val/acc1",
            said=(
                "the best value of scheduler=plateau and the validations waited (its factor stays): begins anew "
                "with val/acc1"
            ),
        ),
        c(
            "scheduler=cosine",
            said="the factor to which scheduler=plateau had lowered the rate, and the validations that it has seen",
        ),
    ),
}


def test_everything_that_a_checkpoint_holds_says_which_keys_it_depends_on(checkpoint: Path) -> None:
    """A new state comes into the table above."""
    part = tensor_tree.read(checkpoint / store.part_of(0))
    inner = {f"strategy.updater.{name}" for name in part.pop("strategy")["updater"]}
    assert {*part, *inner} == STATES.keys()


@pytest.mark.parametrize("state", [name for name, of in STATES.items() if not isinstance(of, str)])
def test_changed_key_is_refused_or_said(state: str, checkpoint: Path) -> None:
    for changed in STATES[state]:
        assert isinstance(changed, Changed)
        if changed.refused:
            with pytest.raises(UserError) as error:
                resumed(checkpoint, *changed.keys)
            assert changed.said in str(error.value)
        else:
            assert any(
                line.startswith(changed.said) or changed.said in line
                for line in resumed(checkpoint, *changed.keys).lost
            ), changed


@pytest.mark.parametrize(
    "changed",
    [
        (),
        ("optimizer.weight_decay=0.0001",),
        ("optimizer.lr_factors={classifier:0.5}",),
        ("optimizer.nesterov=true",),
        ("optimizer.lr=0.1",),
        ("data.num_workers=1",),
    ],
)
def test_what_is_taken_over_wholly_is_not_listed(changed: tuple[str, ...], checkpoint: Path) -> None:
    assert resumed(checkpoint, *changed).lost == []


def test_a_key_that_the_checkpoints_trainer_lacked_had_its_default(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, with what the plan and the worker compare; a key that has another value now is named."""
    about = store.about(checkpoint)
    lacking = copy.deepcopy(dict(about.config))
    assert len([key for section in sections() for key in section.keys if _take_out(lacking, key)]) > 100
    monkeypatch.setattr(store, "about", lambda folder: replace(about, config=lacking))
    found = resumed(checkpoint)
    assert found.lost == found.matters == found.harmless == []
    full = completed(lacking, about.config)
    assert not any(Measures(full, about.config).why_not(metric) for metric in ("val/acc1", "val_ema/loss"))
    assert full["early_stop"] == about.config["early_stop"]
    assert "data.test_fraction was null" in str(resumed(checkpoint, "data.test_fraction=0.1").lost)


def _take_out(config: dict[str, Any], key: Key) -> bool:
    """Take a key with its default out of a config; whether it was there."""
    *groups, name = key.path.split(".")
    for group in groups:
        config = config.get(group) or {}
    if name == "_target_" or name not in config or config[name] != key.default:
        return False
    del config[name]
    return True


def test_refusal_lists_what_would_begin_anew(checkpoint: Path) -> None:
    kept = [override for override in RUN if not override.startswith("optimizer")]
    with pytest.raises(
        UserError,
        match=r"optimizer\._target_ was torch.optim.SGD.*\(not carried over: exp_avg, exp_avg_sq and step of all",
    ):
        composed(*kept, "optimizer=adam", f"resume.path={checkpoint}")


def test_watchers_of_a_changed_metric_begin_anew_and_the_others_go_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run itself: label smoothing makes the loss another one, and val/acc1 is what it was."""
    part = tensor_tree.read(checkpoint / store.part_of(0))
    assert part["report"]["watched"][0] is not None and part["early_stop"]["best"][0] is not None
    monkeypatch.chdir(tmp_path)
    again = (
        "loss.label_smoothing=0.9",
        f"resume={checkpoint}",
        "resume.allow_changes=true",
        "hydra.run.dir=again",
        "limit_val_batches=1",
    )
    kept = [
        o
        for o in RUN
        if o.partition("=")[0] not in {a.partition("=")[0] for a in again} and not o.startswith("callbacks")
    ]
    trainer.run([*kept, *again, f"callbacks=[{{_target_:{COUNTING}.Another}}]"])
    [folder] = (tmp_path / "again" / "checkpoints").glob("step-*")
    now = tensor_tree.read(folder / store.part_of(0))
    assert now["report"]["kept"]["best"]["val/loss"] > part["report"]["kept"]["best"]["val/loss"], (
        "of the new loss alone"
    )
    assert now["report"]["kept"]["best"]["val/acc1"] >= part["report"]["kept"]["best"]["val/acc1"]
    assert now["early_stop"]["best"][1] == AT + 1 and now["strategy"]["updater"]["plateau"]["best"][1] == AT + 1
    assert now["callbacks"][f"callbacks[0] ({COUNTING}.Another)"] == {"count": AT + 1}


A, B = {"_target_": "m.A", "x": 1}, {"_target_": "m.B"}


@pytest.mark.parametrize(
    ("before", "now", "places"),
    [
        ([A, B], [A, B], [0, 1]),
        ([A, B], [B, A], [1, 0]),
        ([A, {**A, "x": 2}], [{**A, "x": 2}], [1]),
        ([A, {**A, "x": 2}], [{**A, "x": 3}, A], [1, 0]),
        ([A], [B, A], [None, 0]),
        ([], [A], [None]),
    ],
)
def test_callback_gets_the_state_of_its_own_class_and_arguments(
    before: list[object], now: list[object], places: list[int | None]
) -> None:
    assert places_before(before, now) == places  # type: ignore[arg-type]
    states = {f"callbacks[{n}] ({node['_target_']})": n for n, node in enumerate(before)} | {"stop": "kept"}  # type: ignore[index]
    found = moved(states, before, now)  # type: ignore[arg-type]
    wanted = {
        f"callbacks[{n}] ({node['_target_']})": place
        for n, (node, place) in enumerate(zip(now, places, strict=True))
        if place is not None
    }  # type: ignore[index]
    assert found == {**wanted, "stop": "kept"}
    assert bool(list(changes(before, now))) == (sorted(map(str, before)) != sorted(map(str, now)))  # type: ignore[arg-type]


def test_what_a_metric_measures_is_compared_by_all_that_it_depends_on() -> None:
    config = {
        "loss": {"_target_": "l"},
        "metrics": {"f1w": {"average": "macro"}},
        "ema": {"decay": None},
        "data": {"root": "a", "flip": 0.5},
    }

    def why(metric: str, **now: object) -> str:
        return Measures(config, {**config, **now}).why_not(metric)

    assert not any(why(metric) for metric in ("val/loss", "val/f1w", "val/acc1"))
    assert not why(
        "val/loss", data={"root": "b", "flip": 0.0, "verify": True, "test_path": "t", "max_pixels": 9}
    ) and not why("val/loss", loss={"_target_": "l", "weight": None})
    assert why("val/loss", loss={"_target_": "l", "label_smoothing": 0.1}) and not why(
        "val/acc1", loss={"_target_": "other"}
    )
    assert why("val/f1w", metrics={"f1w": {"average": "micro"}}) and not why("val/acc1", metrics={})
    assert why("val_ema/acc1", ema={"decay": 0.9}) and why("val/acc1", data={"root": "a", "flip": 0.5, "val_size": 9})
    assert Measures(config, config, other_data=True).why_not("val/acc1") == "the data are others"


@pytest.mark.parametrize(
    ("strategy", "now", "said"),
    [
        (
            {"comm_hook": "powersgd"},
            {"comm_hook": "none"},
            "what workers have left out of their gradients (strategy.comm_hook=powersgd)",
        ),
        ({"wire": "int8"}, {"wire": "full"}, "what workers have left out of their gradients (strategy.wire=int8)"),
        (
            {"comm_hook": "powersgd", "powersgd": {"rank": 1}},
            {"comm_hook": "powersgd", "powersgd": {"rank": 2}},
            "the factors of strategy.comm_hook=powersgd",
        ),
        (
            {"delay_compensation": 0.1},
            {"delay_compensation": 0.1, "slice_above": 9},
            "the parameters that workers had pulled: strategy.slice_above was changed",
        ),
    ],
)
def test_memory_of_a_strategy_that_cannot_go_on_is_said(
    strategy: dict[str, object], now: dict[str, object], said: str
) -> None:
    about, plan = (
        SimpleNamespace(config={"strategy": strategy}, strategy="own", update=0),
        SimpleNamespace(strategy=SimpleNamespace(name="own")),
    )
    [line] = changed_states({"strategy": now}, plan, about)  # type: ignore[arg-type]
    assert line.startswith(said)
    assert not list(changed_states({"strategy": strategy}, plan, about))  # type: ignore[arg-type]


def test_ages_of_rows_that_are_counted_otherwise_are_refused() -> None:
    about = SimpleNamespace(config={"strategy": {"evict_by": "steps"}}, servers=1)
    check_ages(SimpleNamespace(strategy=SimpleNamespace(evict_by="event_time", evict_after=None)), about)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"evict_by=event_time.*counted by steps"):
        check_ages(SimpleNamespace(strategy=SimpleNamespace(evict_by="event_time", evict_after=5)), about)  # type: ignore[arg-type]
