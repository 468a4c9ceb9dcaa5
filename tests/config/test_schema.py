"""Every key is documented and typed in one place, and every option and recipe that is shipped says only such keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf, open_dict, read_write

from tests.composed import composed
from tests.pictures import needs
from trainer.cli import commands
from trainer.cli.compose import compose, folder, hydra_app
from trainer.cli.help import options
from trainer.config import keys, schema
from trainer.config.instantiate import call_target
from trainer.host import hardware
from trainer.planning import validate

ROOT = Path(__file__).resolve().parents[2]
KEYS = [key for section in keys.sections() for key in section.keys]
NAMES_SOMETHING = (
    "probability delay_compensation staleness_power seed split_seed draw_seed node_rank launch.rank launch.priority "
    "master_port"
)
OF_PARAMETERS_OR_THE_METRIC = (
    "lr weight_decay momentum eps clip_norm max_grad_norm trust_coeff clip_value init_scale initial_accumulator_value "
    "min_delta lr_find.first lr_find.last"
)
LINKS = "gbit latency_ms"  # their names say the unit
FACTORS = "beta mix warmup_start gamma final initial least layer_decay power diverged"
SHARES = """
    val_fraction test_fraction min_scale min_ratio flip max_bad_fraction erasing mix_probability label_smoothing epsilon
    decay alpha rise threshold delta
"""  # a threshold is a probability; delta is in units of the label
STRENGTHS = "randaugment_magnitude mixup cutmix"
NO_UNIT = {*" ".join((NAMES_SOMETHING, OF_PARAMETERS_OR_THE_METRIC, FACTORS, LINKS, SHARES, STRENGTHS)).split()}
OPTIONS = [(group, name) for group in schema.GROUPS for name, _ in options(group)]
RECIPES = [name for name, _ in options("recipe")]
CHOSEN = {"model": "lenet", "data": "digits"}


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())


def undocumented(key: keys.Key) -> str:
    """What is wrong with the documentation of a key."""
    if not 2 < len(key.help) < 110 or key.help.endswith("."):
        return f"help {key.help!r}"
    if key.kind is None and not key.choices and not key.rule["texts"] and not key.rule["or_word"]:
        return "neither a type nor the words that it takes"
    if key.kind in (int, float) and bool(key.unit) == bool({key.path, key.path.rpartition(".")[2]} & NO_UNIT):
        return "neither a unit nor a place among those without, or both"
    return ""


def test_every_key_is_documented() -> None:
    assert len(KEYS) > 250
    assert {key.path: why for key in KEYS if (why := undocumented(key))} == {}


def test_every_default_is_a_value_of_its_key() -> None:
    settings = [key for key in KEYS if key.default != "???" and not str(key.default).startswith("${")]
    assert {key.path: why for key in settings if (why := key.refuse(key.default))} == {}


def test_groups_of_the_schema_are_those_of_conf() -> None:
    assert set(schema.GROUPS) == {p.name for p in folder("conf").iterdir() if p.is_dir()} - {"hydra"}


@pytest.mark.all
@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda word: word)
def test_every_option_composes_and_brings_documented_keys_only(group: str, option: str) -> None:
    named = {"optimizer=torch": ["optimizer.name=SGD"], "model=torchvision": ["model.name=resnet18"]}
    chosen = [f"{g}={o}" for g, o in {**CHOSEN, group: option}.items()]
    node = composed(*chosen, *named.get(f"{group}={option}", []))[group]
    paths = {path for path, _ in keys.leaves(node, f"{group}.") if not path.startswith("tracking.trackers.")}
    assert paths <= {key.path for key in KEYS}
    assert dict(options(group))[option], "its file begins with a comment of one line"


@pytest.mark.all
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_passes_the_checks(
    recipe: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = composed(f"+recipe={recipe}", *needs(recipe, tmp_path_factory.mktemp("data")))
    assert config["name"] == recipe, "experiment and folder are called as the recipe"
    assert dict(options("recipe"))[recipe], "its file begins with a comment of one line"
    if "download" in config["data"]:
        config["data"] |= {"download": False, "root": str(tmp_path)}
    checked = validate.check(config)
    assert checked.workers == (checked.declaration.default_workers or 1) and checked.facts.train_samples > 0
    assert list(tmp_path.iterdir()) == []


def test_the_config_reference_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.main(["--check"]) == 0, "make docs"
    monkeypatch.setattr(generate, "PAGE", tmp_path / "config.md")
    assert generate.main(["--check"]) == 1
    (tmp_path / "config.md").write_text("stale")
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("epochs", 1, ""),
        ("epochs", True, "must be a whole number of epochs"),
        ("epochs", "3", "must be a whole number of epochs"),
        ("max_steps", None, ""),
        ("data.batch_size", 0, "must be at least 1 sample"),
        ("optimizer.lr", 1, ""),
        ("optimizer.lr", float("nan"), "must be a finite number"),
        ("scheduler.warmup_start", 1.5, "must be at most 1"),
        ("precision", "fp8", "must be one of auto, fp64, fp32, bf16, fp16"),
        ("data.num_workers", "auto", ""),
        ("data.num_workers", None, ""),
        ("data.prefetch", 3, ""),
        ("data.prefetch", "auto", ""),
        ("data.prefetch", "many", "must be a whole number of batches, or auto"),
        ("data.prefetch", 0, "must be at least 1 batch"),
        ("data.pin_memory", True, ""),
        ("data.pin_memory", "True", ""),
        ("compile", "yess", "must be one of auto, true, false"),
        ("name", 3, "must be text"),
        ("tracking.tags", {"a": "b"}, ""),
    ],
)
def test_what_a_key_refuses(path: str, value: Any, why: str) -> None:
    key = keys.find(path)
    assert key is not None and key.refuse(value) == why


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("epoch", "epochs"),
        ("lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("optimizer.wieght_decay", "optimizer.weight_decay"),
        ("scheduler.foo", ""),
        ("qqq", ""),
    ],
)
def test_nearest_key(typed: str, near: str) -> None:
    assert keys.nearest_key(typed, keys.every_key()) == near


@pytest.mark.parametrize(
    "overrides",
    [
        ("+recipe=digits_lenet", "optimizer.lr=0.3", "+optimizer.foo=1"),
        ("+recipe=resnet50_flowers", "strategy=pserver_sync", "~model.zero_init_residual", "launch.servers=2"),
    ],
)
def test_configs_that_tests_copy_are_those_that_hydra_composes(overrides: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for config_dir in (None, None, str(tmp_path)):  # what is in a test's folder is composed anew
        with hydra_app(config_dir) as app:
            config = compose(app, list(overrides))
            with read_write(config.hydra), open_dict(config.hydra):
                del config.hydra.runtime.config_sources, config.hydra.runtime.output_dir
            found.append((commands.plain(config), OmegaConf.to_container(config, resolve=False)))
    assert found[0] == found[1] == found[2]


def test_one_of_each_unit_is_a_word() -> None:
    units = {part for key in KEYS for part in [keys._units(key.unit, 1).strip()] if part}
    words = """
        GPU GiB KiB MiB batch change channel checkpoint class column core element epoch feature group host id image
        job level minute number part pixel preemption process push restart rewind row sample second slot step thread
        unit update use validation value worker
    """
    assert units <= {*words.split(), "steps or event time"}


class Started(torch.nn.Linear):
    """A model that wants the argument that recipes of the reference's models bring along."""

    def __init__(self, init: str) -> None:
        super().__init__(2, 2)
        self.init = init


def test_init_that_a_recipe_has_left_over_reaches_a_model_that_cannot_do_without() -> None:
    assert call_target({"_target_": f"{__name__}.Started", "init": "default"}, "model").init == "default"
    made = call_target({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2, "init": "default"}, "model")
    assert isinstance(made, torch.nn.Linear), "and no other one"
