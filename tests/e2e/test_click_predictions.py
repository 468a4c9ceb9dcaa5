"""mode=predict for rows, and the logged model, give the probability that numpy computes by docs/ctr.md from the
weights."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import trainer as package
from tests.pages import blocks
from tests.runs import mlflow_runs, read, script, trainer
from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.data.criteo.rows import CriteoRowReader
from trainer.errors import UserError

CLICKS = [
    "+recipe=wide_and_deep",
    "data.train_rows=2000",
    "data.val_rows=200",
    "data.hash_size=1000",
    "strategy=single",
    "launch.servers=null",
    "data.batch_size=64",
    "epochs=1",
    "model.hidden=[8,4]",
    "precision=fp32",
]
OFF = "tracking=none"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the code in docs/ctr.md defines."""
    [code] = [code for code in blocks("ctr.md") if "def token_id" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def row(generator: random.Random) -> bytes:
    """39 fields, many of them empty, tokens of any bytes and length."""
    integers = [b"" if generator.random() < 0.3 else b"%d" % generator.randrange(-50, 3000) for _ in range(13)]
    letters = ["a", "7", "ä", "漢", "🌸", "\x00", "\x85", " ", '"', ",", "="]
    tokens = [
        b"" if generator.random() < 0.2 else "".join(generator.choices(letters, k=generator.randrange(1, 30))).encode()
        for _ in range(25)
    ]
    return b"\t".join([*integers, *tokens, bytes(generator.choices(range(128, 256), k=9))])


@pytest.mark.parametrize("size", [None, 2, 1000, 1000001, 2**62])
def test_the_pages_code_is_the_products(page: dict[str, Any], size: int | None) -> None:
    generator = random.Random(size or 0)
    rows = [row(generator) for _ in range(150)]
    rows[0] = b"\t" * 38
    for before, labelled in ((b"", False), (b"1\t", True), (b"no number\t", True)):
        reader = CriteoRowReader(size)
        text = b"".join(before + r + b"\n" for r in rows)
        assert reader.labelled(text) is labelled
        found = reader.read(text, labelled)
        assert found.good.all() and not found.bad
        expected = [page["inputs"](before + r, size) for r in rows]
        np.testing.assert_array_equal(found.inputs["sparse"], np.array([ids for _, ids in expected]))
        np.testing.assert_array_equal(found.inputs["dense"], np.array([d for d, _ in expected], np.float32))


def test_the_example_of_a_row_is_one() -> None:
    text = CriteoRowReader.example.encode() + b"\n"
    assert CriteoRowReader(10).labelled(text) is False and CriteoRowReader(10).read(text, False).good.tolist() == [True]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an MLflow model, and of rows: 300 with labels, 9,000 packed ones without, some wrong."""
    folder = tmp_path_factory.mktemp("clicks")
    done = trainer(*CLICKS, "hydra.run.dir=run", cwd=folder, timeout=2400)
    assert done.returncode == 0, done.stderr
    generator = random.Random(1)
    (folder / "in").mkdir()
    labelled = [b"1\t" + row(generator) for _ in range(300)]
    labelled[17] = b"\t".join(labelled[17].split(b"\t")[1:])  # a field is missing: no row without label
    labelled[250] = b"1\t" + b"x" + b"\t" * 38
    (folder / "in" / "a.tsv").write_bytes(b"\r\n".join(labelled))
    plain = [row(generator) for _ in range(200)] * 45
    plain[8000] = b""
    with gzip.open(folder / "in" / "b.gz", "wb") as file:
        file.write(b"\n".join(plain) + b"\n")
    return folder


def probabilities(folder: Path, page: dict[str, Any]) -> Callable[[list[bytes]], np.ndarray]:
    """Of rows, by numpy, in float64."""
    state = {name: array.astype(np.float64) for name, array in load_file(folder / "run" / "model.safetensors").items()}

    def of(rows: list[bytes]) -> np.ndarray:
        dense, ids = zip(*(page["inputs"](r, 1000) for r in rows), strict=True)
        numbers, layer = np.array(dense), np.array(ids)
        layer = np.concatenate([numbers, state["embedding.weight"][layer].reshape(len(rows), -1)], 1)
        for number in (0, 2):
            layer = np.maximum(layer @ state[f"deep.{number}.weight"].T + state[f"deep.{number}.bias"], 0)
        logits = layer @ state["deep.4.weight"].T + state["deep.4.bias"]
        logits += numbers @ state["wide.weight"].T + state["wide.bias"]
        return 1 / (1 + np.exp(-logits[:, 0]))

    return of


@pytest.mark.all
@pytest.mark.parametrize("workers", [1, 2])
def test_every_row_has_its_probability_in_the_order_of_the_rows(
    trained: Path, page: dict[str, Any], workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["mode=predict", f"weights={trained}/run", f"predict.input={trained}/in", f"launch.nproc={workers}"]
    result = package.run(
        [*CLICKS, OFF, *arguments, f"hydra.run.dir={tmp_path}/run", f"predict.output={tmp_path}/p.csv"]
    )
    found = list(csv.reader((tmp_path / "p.csv").open(newline="")))
    assert found[0] == ["file", "row", "probability", "error"]
    files = {
        "a.tsv": (trained / "in" / "a.tsv").read_bytes().splitlines(),
        "b.gz": gzip.decompress((trained / "in" / "b.gz").read_bytes())[:-1].split(b"\n"),
    }
    assert [tuple(line[:2]) for line in found[1:]] == [
        (n, str(i + 1)) for n, rows in files.items() for i in range(len(rows))
    ]
    wrong = {(n, int(i)): why for n, i, p, why in found[1:] if not p}
    assert wrong == {
        ("a.tsv", 18): "39 fields instead of 40",
        ("a.tsv", 251): "integer feature 1 is 'x', not an integer",
        ("b.gz", 8001): "an empty line",
    }
    right = [(p, files[n][int(i) - 1]) for n, i, p, why in found[1:] if not why]
    distinct = {r: i for i, (_, r) in enumerate(right)}
    truth = dict(zip(distinct, probabilities(trained, page)(list(distinct)), strict=True))
    np.testing.assert_allclose([float(p) for p, _ in right], [truth[r] for _, r in right], rtol=2e-5)
    assert result.samples == 9300 and result.metrics == {"predict/rows": 9300.0, "predict/unreadable": 3.0}
    assert result.unreadable == [f"{n}:{i}: {why}" for (n, i), why in wrong.items()]
    assert "3 of 9300 rows could not be read: a.tsv:18: 39 fields instead of 40; " in capfd.readouterr().out


LOAD = """
import csv, json, sys, mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(f"runs:/{sys.argv[2]}/wide_and_deep")
rows = [r for r in open("in/a.tsv", "rb").read().splitlines() if len(r.split(b"\\t")) == 40][:200]
texts = [r.decode("utf-8", "surrogateescape") for r in rows]
utf8 = [r.rsplit("\\t", 1)[0] + "\\tß" for r in texts]
found = {"bytes": model.unwrap_python_model().predict(None, rows).tolist(), "list": model.predict(utf8).tolist()}
found["frame"] = model.predict(pandas.DataFrame({"row": utf8})).tolist()
found["bare"] = model.predict([r.split("\\t", 1)[1] for r in utf8]).tolist()
try:
    model.predict([*utf8[:2], "x"])
except ValueError as error:
    found["error"] = str(error)
found["example"] = model.predict(model.input_example).tolist()
json.dump(found, open(sys.argv[3], "w"))
"""


def test_the_logged_model_takes_rows_and_says_the_same(trained: Path, page: dict[str, Any], tmp_path: Path) -> None:
    [run] = mlflow_runs(trained)
    arguments = [f"sqlite:///{trained}/mlflow.db", run.info.run_id, str(tmp_path / "found.json")]
    loaded = script(LOAD, *arguments, cwd=trained)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [r for r in (trained / "in" / "a.tsv").read_bytes().splitlines() if len(r.split(b"\t")) == 40][:200]
    utf8 = [r.rsplit(b"\t", 1)[0] + "\tß".encode() for r in rows]
    of = probabilities(trained, page)
    np.testing.assert_allclose(found["bytes"], of(rows), rtol=2e-5)
    for given in ("list", "frame", "bare"):
        np.testing.assert_allclose(found[given], of(utf8), rtol=2e-5)
    assert found["error"].startswith(
        "row 3: 1 field instead of 40; a row is a label or none, 13 integers and 26 tokens"
    )
    assert len(found["example"]) == 1
    assert read(trained / "run" / "model.json")["rows"]["hash_size"] == 1000


def test_rows_that_cannot_be_predicted_are_refused_before_anything_starts(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("no rows\nat all\n")
    (tmp_path / "cut.gz").write_bytes((trained / "in" / "b.gz").read_bytes()[:3000])
    (tmp_path / "empty").write_text("")
    for given, why in {
        "nowhere.tsv": r"predict\.input=nowhere\.tsv: there is no such file, folder or pattern",
        "text.txt": r"predict\.input=.*text\.txt: has no row in its first MiB \(a label or none, 13 integers",
        "cut.gz": r"predict\.input=.*cut\.gz: cannot be read: ",
        "empty": r"predict\.input=.*empty: is empty",
    }.items():
        with pytest.raises(UserError, match=why):
            package.run([*CLICKS, OFF, "mode=predict", f"weights={trained}/run", f"predict.input={given}"])
    other = [
        *CLICKS,
        OFF,
        "data.hash_size=999",
        "model.table_size=1000",
        "mode=predict",
        f"weights={trained}/run",
        f"predict.input={trained}/in",
    ]
    with pytest.raises(
        UserError,
        match=(
            r"data\.hash_size=999: the run that left the weights had data\.hash_size=1000\. Type instead: "
            r"data\.hash_size=1000"
        ),
    ):
        package.run(other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gz", "empty", "text.txt"]


def test_the_training_rows_need_not_be_there(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "empty"))
    given = [*CLICKS[0:1], "data=criteo", f"data.path={tmp_path}/gone.tsv", *CLICKS[3:]]
    with pytest.raises(UserError, match=r"data\.path=.*gone\.tsv: there is no such file"):
        package.run([*given, OFF, "mode=eval", f"weights={trained}/run"])
    arguments = ["mode=predict", f"weights={trained}/run", f"predict.input={trained}/in/a.tsv", "hydra.run.dir=run"]
    result = package.run([*CLICKS, OFF, *arguments])
    assert result.status == "done" and result.samples == 300
    source = call_target(asdict(schema.SyntheticCriteoData()), "data")
    assert len(source.fingerprint(source.facts(1))) == 32, "MLflow's run is told a digest"
    assert not (tmp_path / "empty").exists(), "nothing is drawn"
