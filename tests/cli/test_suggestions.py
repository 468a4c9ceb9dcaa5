"""What a refusal proposes is taken, or gets further; and no command line, however random, ends in a traceback."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import CASES
from tests.refusals import Case
from trainer.cli import arguments, compose, explain, sweep_composing, sweep_points
from trainer.cli.vocabulary import Vocabulary
from trainer.config import keys
from trainer.errors import UserError
from trainer.host import hardware
from trainer.planning import validate

A_WORD = re.compile(r"(?:[+~]*[A-Za-z][\w./@-]*(?:=\S*)?|-m)$")
TO_BE_FILLED_IN = re.compile(r"\b(?:[A-Z]{3,}(?:_[A-Z]+)*)\b|10\.0\.0\.1|\$\{")
EVERY = 24
"""Of the table every so many-th case is tried each time; all of them by ``make test-long``."""


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """Hydra, once."""
    with compose.hydra_app() as hydra:
        yield hydra


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus", lambda: ())


def refusal(app: Any, argv: list[str]) -> UserError | None:
    """What the checks that need no torch say to a command line."""
    try:
        overrides = arguments.hydra_overrides([word for word in argv if word != "-m"])
        if "-m" not in argv:
            config = compose.compose(app, overrides)
            compose.named_folder(config, "hydra.run.dir")
            validate.check(compose.plain(config), arguments.typed_keys(overrides))
            return None
        master = sweep_composing.compose_sweep(app, overrides, "config")
        for job in sweep_points.expand(master)[:2]:
            with explain.sentences(app, job):
                config = app.config_loader.load_sweep_config(master, job)
            validate.check(compose.plain(config), arguments.typed_keys(job))
    except UserError as error:
        return error
    except OSError as error:  # as trainer/__main__.py tells it
        return UserError(str(error.filename), str(error.strerror))
    return None


def follow(argv: list[str], refused: UserError) -> list[str] | None:
    """The command line with what is proposed in the place of what was refused; None where something is still to be
    filled in, or it is no override."""
    instead = refused.instead
    try:
        words = shlex.split(re.sub(r" \(.*\)$", "", instead.partition(", or ")[0]).replace(": ", ":"))
    except ValueError:
        return None
    argv = [
        old
        for old in argv
        if keys.key_of(old).partition("@")[0] != keys.key_of(refused.what).partition("@")[0] and old != refused.what
    ]
    if not words or TO_BE_FILLED_IN.search(instead) or not all(A_WORD.match(word) for word in words):
        return None
    for word in words:
        key = keys.key_of(word)
        there = [place for place, old in enumerate(argv) if keys.key_of(old) == key]
        argv = [old for place, old in enumerate(argv) if place not in there[1:]]
        argv = [word if place in there[:1] else old for place, old in enumerate(argv)] if there else [*argv, word]
    return argv


def leads_on(app: Any, case: Case) -> bool:
    """Whether the proposal could be tried; fails where it is refused as before."""
    argv = shlex.split(case.typed) if "'" not in case.typed else case.typed.split()
    if any(word.startswith("--") for word in argv) or (first := refusal(app, argv)) is None:
        return False  # of flags and of what needs torch the table itself has tests
    proposed = follow(argv, first)
    if proposed is None:
        return False
    second = refusal(app, proposed)
    assert second is None or (second.what, second.why) != (first.what, first.why), (str(first), str(second))
    repeated = second is not None and second.instead and follow(proposed, second) == argv
    assert not repeated, f"in circles: {first} and {second}"
    return True


@pytest.mark.all
def test_what_is_proposed_is_taken_or_gets_further(app: Any) -> None:
    assert sum(leads_on(app, case) for case in CASES[::EVERY]) > len(CASES) / EVERY / 4


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.typed[:100])
def test_every_proposal_is_taken_or_gets_further(app: Any, case: Case) -> None:
    leads_on(app, case)


DIGITS, CTR = "+recipe=digits_lenet", "+recipe=wide_and_deep"


@pytest.mark.all
@pytest.mark.parametrize(
    ("typed", "instead", "taken"),
    [
        ("+recipe", "+recipe=NAME", False),
        (f"{DIGITS} launch.nnodes=10000 launch.nproc=8", "launch.nnodes=5 launch.nproc=8", True),
        (f"{DIGITS} launch.nproc=4000", "launch.nproc=44", True),
        (f"{DIGITS} launch.workers=4000", "launch.workers=44", True),
        ("+recipe=resnet50_flowers launch.nnodes=10000 launch.nproc=8", "launch.nnodes=3 launch.nproc=8", True),
        (
            f"{CTR} strategy=pserver_async launch.nnodes=10000 launch.servers=1 launch.workers=8 launch.insecure=true",
            "launch.nnodes=8",
            True,
        ),
        (f"{DIGITS} compile=yess", "compile=true", True),
        (f"{DIGITS} plan=tru", "plan=true", True),
        (f"{DIGITS} compile=nope", "compile=false", True),
        (f"{DIGITS} compile=perhaps", "compile=false", True),
        (f"{DIGITS} ema.decay=1", "ema.decay=0.999", True),
        (f"{CTR} data.train=nothere/*.tsv", "data=criteo 'data.path=nothere/*.tsv'", False),
        (f"{DIGITS} data.limit_train_batches=4", "limit_train_batches=4", True),
        (f"{DIGITS} data.max_steps=4", "max_steps=4", True),
        (f"{DIGITS} +data.epochs=3", "epochs=3", True),
        (f"{DIGITS} +data.image_size=1000", "", False),
        (f"{DIGITS} epochs=1e3", "epochs=1000", True),
        (f"{DIGITS} epochs=two", "epochs=12", True),
        (f"{DIGITS} scheduler.warmup_epochs=x", "scheduler.warmup_epochs=1.0", True),
        (f"-m {DIGITS} optimizer.lr=0.1,x", "optimizer.lr=0.05", True),
    ],
)
def test_the_proposal_is_what_was_meant_and_is_taken(typed: str, instead: str, taken: bool, app: Any) -> None:
    first = refusal(app, typed.split())
    assert first is not None and first.instead == instead, str(first)
    if taken:
        proposed = follow(typed.split(), first)
        assert proposed is not None and (refusal(app, proposed) is None or "compile=true" in proposed)


@pytest.mark.parametrize("mode", ["eval", "predict"])
@pytest.mark.parametrize(
    "weights", ["run", "run/model.safetensors", "run/checkpoints/best.safetensors", "elsewhere.pt"]
)
def test_saved_weights_without_a_recipe_name_the_command_that_needs_none(mode: str, weights: str, app: Any) -> None:
    Path("run").mkdir()
    Path("run/plan.json").write_text("{}")
    error = refusal(app, [f"mode={mode}", f"weights={weights}"])
    assert error is not None and "train anything" not in str(error) and "nothing to train" not in str(error)
    needs_none = f"python -m trainer {mode} {weights}" + (" INPUT" if mode == "predict" else "")
    assert error.instead == ("+recipe=NAME" if "else" in weights else needs_none)
    assert error.what == f"mode={mode}" and "needs the recipe" in error.why


VALUES = """
    0 -1 2 1e400 nan inf '' null true abc [1,2] [] {a:1} {} [{_target_:x}] ${epochs} ${oc.env:HOME} ${nope} val/loss a=b
    'a,b' "x" ../x 3.5 ~ ${ [ auto 1,2 range(1,3)
""".split()
VALUES += ["", "1" + "0" * 30, "9" * 5000, "x" * 300, "\x00", "é", "\udcff"]
FORMS = ["{key}={value}"] * 8 + ["{group}={option}"] * 4
FORMS += """
    +{key}={value} ++{key}={value} ~{key} ~{key}={value} {key} {key}.x={value} ={value} +{key} {key}@x={value}
    +{group}={option} ~{group} {group}={value} {group}@data={option} hydra.{key}={value} hydra/launcher={value}
    hydra.run.dir={value} hydra.sweep.dir={value} {key}:{value}
""".split()
RECIPES = ["+recipe=digits_lenet"] * 6 + ["+recipe=wide_and_deep", "+recipe=resnet50_random", "model=lenet"]


def made_up(rng: random.Random, vocabulary: Vocabulary) -> list[str]:
    """A random command line."""
    known = sorted({key.path for section in keys.sections() for key in section.keys})
    argv = [rng.choice(RECIPES)]
    for _ in range(rng.randint(1, 3)):
        group = rng.choice(vocabulary.groups)
        option = rng.choice(vocabulary.options(group))
        argv.append(
            rng.choice(FORMS).format(key=rng.choice(known), value=rng.choice(VALUES), group=group, option=option)
        )
    return argv + ["plan=true"] * (rng.random() < 0.15) + ["-m"] * (rng.random() < 0.15)


@pytest.mark.parametrize("count", [15, pytest.param(2000, marks=pytest.mark.long)])
def test_no_command_line_ends_in_a_traceback(count: int, app: Any, tmp_path: Any) -> None:
    rng, vocabulary = random.Random(count), Vocabulary(app, [], "config")
    for _ in range(count):
        argv = made_up(rng, vocabulary)
        try:
            error = refusal(app, argv)
        except Exception as broken:
            raise AssertionError(f"python -m trainer {argv}") from broken
        assert error is None or (str(error).isprintable() and len(str(error)) < 3000), argv
    assert list(tmp_path.iterdir()) == []
