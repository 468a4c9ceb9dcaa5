"""What docs/adding.md shows runs as it stands; tables of docs/data.md and docs/evaluation.md are what the product
does."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer as package
from tests.pages import BLOCK, NAMED, blocks, write_files
from tests.runs import ROOT, read, script, trainer
from trainer.config import schema
from trainer.config.instantiate import call_target


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files in an empty folder outside the checkout."""
    folder = tmp_path_factory.mktemp("adding")
    write_files("adding.md", folder)
    return folder


def commands(page: str) -> list[list[str]]:
    """The command lines of a page that start ``python -m trainer``, in its first section."""
    text = (ROOT / "docs" / page).read_text().partition("\n## ")[0]
    return [
        shlex.split(line, comments=True)[3:] for line in re.findall(r"^    (python -m trainer .*)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(3, marks=pytest.mark.long), 4, 5, 6])
def test_the_page_about_adding_runs_as_it_stands(example: Path, number: int) -> None:
    command = commands("adding.md")[number]
    done = trainer(*command, "tracking=none", "hydra.run.dir=run", cwd=example, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    if "plan=true" in command:
        assert "squares: 1000 training and 200 validation samples of (1, 8, 8), 2 classes" in " ".join(
            done.stdout.split()
        )
        return
    result, plan = read(example / "run" / "result.json"), read(example / "run" / "plan.json")
    if "task=quantiles" in command:  # tests/tasks/test_own_task.py looks at its numbers
        assert result["status"] == "done" and plan["objective"]["task"] == "quantiles"
        return
    assert result["status"] == "done" and result["metrics"]["val/acc1"] > 0.95
    assert result["steps"] == 3 * (20 if number == 4 else 1000 // (50 * plan["topology"]["roles"]["worker"]))
    assert read(example / "run" / "classes.json") == ["left", "right"]
    if number == 1:
        assert (
            plan["strategy"]["name"] == "averaging"
            and plan["strategy"]["traits"]["exact"]
            and plan["topology"]["roles"] == {"worker": 2}
        )
    if number == 4:
        assert plan["data"]["stream"] and result["samples"] == result["steps"] * 100
    elif number == 3:
        assert plan["topology"]["roles"] == {"worker": 2} and (example / "run" / "workerlog.1").exists()
    rates = [json.loads(line)["metrics"] for line in (example / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {m["lr"] for m in rates if "lr" in m} == {0.003 / 2**part for part in range(4)}, "the page's schedule"


def test_every_block_of_code_says_its_file_and_the_strategy_is_short(example: Path) -> None:
    for page in ("adding.md", "callbacks-and-metrics.md"):
        for language in ("python", "yaml"):
            assert all(NAMED.match(code) for code in blocks(page, language)), page
    code = (example / "my_package" / "averaging.py").read_text()
    assert len([line for line in code.splitlines() if line]) <= 43 and "..." not in code


@pytest.mark.all
def test_the_example_of_a_test_in_contributing_passes(tmp_path: Path) -> None:
    [code] = [code for language, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()) if language == "python"]
    example: dict[str, Any] = {}
    exec(code, example)
    [test] = [value for name, value in example.items() if name.startswith("test_")]
    test(tmp_path)


@pytest.mark.all
def test_the_example_of_a_table_runs_as_it_stands(tmp_path: Path) -> None:
    assert write_files("data.md", tmp_path) == ["make_table.py"]
    text = (ROOT / "docs" / "data.md").read_text().partition("## Read a table\n")[2].partition("\n```")[0]
    made = script((tmp_path / "make_table.py").read_text(), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (command,) = re.findall(r"^    python -m trainer (.*)$", text, re.MULTILINE)
    done = trainer(*shlex.split(command), "tracking=none", "hydra.run.dir=run", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = read(tmp_path / "run" / "plan.json")["data"]["facts"]
    assert (facts["train_samples"], facts["val_samples"], facts["task"]) == (400, 100, "classification")
    assert read(tmp_path / "run" / "classes.json") == [f"digit {number}" for number in range(10)]


def source_of(name: str) -> Any:
    """The data source of an option, with its defaults."""
    text = (ROOT / "conf" / "data" / f"{name}.yaml").read_text()
    declared = getattr(schema, re.findall(r"/schema/(\w+)@_here_", text)[0])
    return call_target(asdict(declared()), "data")


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the page's table whose first columns have that heading."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_preprocessing_is_what_each_source_does() -> None:
    from trainer.data.source import Facts

    told = {}
    for names, resize, crop, divide, mean, std in table("data.md", "data | shorter side becomes"):
        for name in re.findall(r"`(\w+)`", names):
            told[name] = [
                re.findall(r"[\d.]+", cell)[-1:] if key < 2 else cell
                for key, cell in enumerate((resize, crop, divide, mean, std))
            ]
    options = {path.stem for path in (ROOT / "conf" / "data").glob("*.yaml")} - {"criteo", "synthetic_criteo"}
    assert told.keys() == options
    for name, (resize, crop, divide, mean, std) in told.items():
        shape = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "digits": (1, 8, 8)}.get(name, (3, 224, 224))
        done = source_of(name).image_preprocessing(Facts("", "", 1, 1, shape, 10))
        assert [str(v) for v in (done["resize"], done["crop"]) if v is not None] == [*resize, *crop], name
        assert (done["divide"] == 255) == divide.startswith("/ 255"), name
        for key, cell in (("mean", mean), ("std", std)):
            assert done[key] == (None if cell == "-" else [float(v) for v in cell.split()]), name
        assert done["mean"] is None or done["channels"] == len(done["mean"])


def test_arrays_of_a_validation_are_the_documented_ones_and_preprocessing_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    package.run(["+recipe=digits_lenet", "tracking=none", "verbosity=debug", "max_steps=3", f"hydra.run.dir={run}"])
    sizes = {"C": 10, "M": 24, "H": 8, "W": 8}
    with np.load(run / "validation.last.npz") as found:
        documented = {row[0].strip("`"): row[1:3] for row in table("evaluation.md", "array")}
        assert documented.keys() == set(found.files)
        for name, (kind, shape) in documented.items():
            array = found[name]
            assert array.dtype.name.startswith(kind), name
            assert array.shape == eval(shape.replace("1 or 3", "1"), dict(sizes)), name
        labels, guesses, hits = (found[name] for name in ("labels", "guesses", "hits"))
        matrix = found["confusion"]
        assert labels.sum() == guesses.sum() == 359 and (matrix.sum(1) == labels).all()
        assert (matrix.sum(0)[:10] == guesses).all() and (matrix.diagonal() == hits).all()
        assert json.loads(str(found["metrics"]))["acc1"] == pytest.approx(hits.sum() / 359)
        assert (found["mistakes"][:, 1] != found["mistakes"][:, 2]).all()
        assert (np.diff(found["mistakes"][:, 4]) <= 0).all(), "the greatest loss first"
    told = {"resize": 8, "crop": 8, "channels": 1, "divide": 255, "mean": [0.305], "std": [0.376]}
    assert read(run / "plan.json")["data"]["preprocessing"] == read(run / "model.json")["preprocessing"] == told
    assert "shorter side to 8, centre 8 x 8, / 255, mean 0.305, std 0.376" in " ".join(capfd.readouterr().out.split())
