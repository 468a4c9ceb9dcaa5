"""What a user's own classes answer is checked before anything starts: one sentence names the class and what it should
do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests import composed
from trainer.errors import RunFailed, UserError
from trainer.job.prepared_data import prepared
from trainer.strategies.contract import Strategy
from trainer.strategies.single import Single
from trainer.worker.user_strategy import check_set_up

HERE = "tests.planning.mistakes"
ready = partial(composed.ready, "+recipe=digits_lenet", "tracking=none", "device=cpu")


STRATEGIES = {
    "NoWorker": r"has no worker\. Write worker = 'module:class', the Strategy that runs in each worker",
    "NoModule": r"its worker='tests\.planning\.mistaks:Unfinished': tests\.planning has no 'mistaks'",
    "NoName": (
        r"its worker='.*Unfinishd': tests\.planning\.mistakes has no 'Unfinishd'\. Type instead: worker = "
        r"'tests\.planning\.mistakes:Unfinished'"
    ),
    "Dotted": r"its worker='.*' is not 'module:class'\. Type instead: worker = 'tests\.planning\.mistakes:Unfinished'",
    "ClassItself": (
        r"its worker is the class Collective, not a text\. Type instead: worker = "
        r"'trainer\.strategies\.collective:Collective'"
    ),
    "NotAWorker": r"its worker='.*:Lazy' is the class Lazy, not a subclass of trainer\.strategies\.contract\.Strategy",
    "ItsOwnWorker": r"its worker='.*:Good' is a Declaration, not a subclass of trainer\.strategies\.contract\.Strategy",
    "UnfinishedWorker": r"its worker='.*:Unfinished' lacks the methods all_reduce_sum, step",
    "NoEntry": r"its entries\['server'\]='.*:serve': tests\.planning\.mistakes has no 'serve'",
    "EntryIsNoFunction": r"its entries\['server'\]='.*:NOTHING' is None, not a function",
    "TraitsDict": r"its traits are something of type dict\. Write traits = Traits\(exact=",
    "TraitsTypo": r"its traits breaks in .*mistakes\.py:\d+: TypeError: .*same_evrywhere",
    "RefusesNone": r"its refuse returned None\. Return a list of UserErrors, empty where nothing is refused",
    "RefusesText": (
        r"its refuse returned a list with something of type str\. Return a list of "
        r"trainer\.errors\.UserError"
    ),
    "RefuseBreaks": r"its refuse breaks in .*mistakes\.py:\d+: AttributeError",
    "ModelRefusesNone": r"its refuse_model returned None",
    "OwnInit": r"has an __init__ of its own that does not keep the keys\. Leave __init__ alone",
    "Unfinished": r"is no trainer\.strategies\.contract\.Declaration, which strategy needs",
}
DATA = {
    "FactsDict": r"its facts returned something of type dict\. Return a trainer\.data\.source\.Facts",
    "NoClasses": (
        r"its facts breaks in .*mistakes\.py:\d+: TypeError: .*missing 1 required positional "
        r"argument: 'classes'"
    ),
    "TextFacts": r"its facts returned Facts with train_samples='100'\. It must be a whole number of at least 0",
    "ListShape": r"its facts returned Facts with shape=\[1, 8, 8\]\. It must be a tuple of whole numbers",
    "NoOpen": r"lacks the method open\.",
    "KeepsNothing": r"has an __init__ of its own that does not keep the keys\. Leave __init__ alone",
    "Good": r"is no trainer\.data\.source\.DataSource, which data needs",
}
LAUNCHERS = {
    "LauncherRefusesText": r"its refuse returned something of type str",
    "NoLaunch": r"lacks the method launch\.",
    "Lazy": r"is no trainer\.planning\.launcher\.Launcher, which launch needs",
}
MODELS = {"Good": r"is no torch\.nn\.Module, which model needs"}
CASES = [
    *(("strategy", name, says) for name, says in STRATEGIES.items()),
    *(("data", name, says) for name, says in DATA.items()),
    *(("launch", name, says) for name, says in LAUNCHERS.items()),
    *(("model", name, says) for name, says in MODELS.items()),
]


@pytest.mark.parametrize(("group", "name", "says"), CASES, ids=lambda part: part if "\\" not in part else "")
def test_mistake_is_named_with_its_class(group: str, name: str, says: str) -> None:
    taken_away = ["~model.image_size", "~model.in_channels"] if group == "model" else []
    with pytest.raises(UserError, match=rf"^{group}\._target_={HERE}\.{name}: {says}"):
        ready(f"{group}._target_={HERE}.{name}", *taken_away)


def test_lazy_layer_that_has_seen_no_batch_is_named() -> None:
    with pytest.raises(
        UserError,
        match=(
            r"^model \(.*\.Lazy\): has lazy layers whose sizes are not known yet \(layers\.1\.weight\)\. Call the "
            r"layers once"
        ),
    ):
        ready(f"model._target_={HERE}.Lazy", "~model.image_size", "~model.in_channels")


def test_model_without_a_target_is_told_the_line_that_lacks() -> None:
    with pytest.raises(UserError, match=r"^model\._target_: .*Type instead: _target_: my_package"):
        ready("~model._target_")


def test_prepare_that_returns_nothing_is_told_what_to_return() -> None:
    with pytest.raises(
        UserError, match=r"PreparesNothing: its prepare returned None\. Return a .*Facts \(the facts that it was given"
    ):
        prepared(ready(f"data._target_={HERE}.PreparesNothing"))


def test_setup_that_returns_no_model_or_makes_no_optimizer_is_named() -> None:
    import torch

    strategy = object.__new__(type("Own", (Single,), {}))
    with pytest.raises(RunFailed, match=r"\.Own: setup returned None\. Return the module to call in training"):
        check_set_up(strategy, None)
    with pytest.raises(RunFailed, match=r"\.Own: setup made no optimizer\. Write self\.updater = "):
        check_set_up(strategy, torch.nn.Identity())
    check_set_up(object.__new__(type("Elsewhere", (Single,), {"lr": 0.1})), torch.nn.Identity())
    strategy.updater = object()
    check_set_up(strategy, torch.nn.Identity())


def test_checkpoint_of_a_strategy_without_an_optimizer_and_a_save_of_its_own_is_refused(tmp_path: Path) -> None:
    elsewhere = object.__new__(type("Elsewhere", (Single,), {"save": Strategy.save}))
    with pytest.raises(
        RunFailed, match=r"\.Elsewhere has no optimizer of its own .* and no method save, .*type checkpoint=none"
    ):
        elsewhere.save(tmp_path)
