"""``data=table``: the images of a table train as the same images in folders do; a table that is wrong is refused."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import trainer
from tests.composed import ready
from tests.runs import points, read
from tests.runs import trainer as command
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.table import Table
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import UserError

Row = tuple[str, str]
SMALL = """
    model=convnet tracking=none epochs=2 data.batch_size=8 data.image_size=32 execution.log_every=1
    execution.threads=1 precision=fp64 device=cpu verbosity=quiet scheduler=constant
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train/ and val/ of classes cat and dog, and test/, of images that differ."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 13), ("val", 5), ("test", 3)):
        for name in ("cat", "dog"):
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(place / f"{number:02}.png")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))


def rows_of(folder: Path, split: str) -> list[Row]:
    found = sorted((folder / split).rglob("*.png"))
    return [(path.relative_to(folder).as_posix(), path.parent.name) for path in found]


def written(path: Path, rows: Sequence[Sequence[Any]], names: Sequence[str] = ("image", "label")) -> Path:
    if path.suffix == ".parquet":
        columns = list(zip(*rows, strict=True))
        parquet.write_table(pa.table({name: list(column) for name, column in zip(names, columns, strict=True)}), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    return path


def opened(source: DataSource) -> tuple[Facts, Splits]:
    facts = source.facts(8)
    return facts, source.open(facts)


def table(path: Path, **keys: Any) -> Table:
    return Table(path=str(path), image_size=16, cache="none", **keys)


@pytest.mark.all
@pytest.mark.parametrize("suffix", ["csv", pytest.param("parquet", marks=pytest.mark.all)])
def test_a_table_trains_as_the_folders_of_its_images_do(folder: Path, tmp_path: Path, suffix: str) -> None:
    paths = {split: written(folder / f"{split}.{suffix}", rows_of(folder, split)) for split in ("train", "val", "test")}
    typed = [f"data.path={paths['train']}", f"data.val_path={paths['val']}", f"data.test_path={paths['test']}"]
    trainer.run([*SMALL, "data=imagefolder", f"data.root={folder}", f"hydra.run.dir={tmp_path / 'folders'}"])
    trainer.run([*SMALL, "data=table", *typed, f"hydra.run.dir={tmp_path / 'table'}"])
    for metric in ("train/loss", "val/loss", "test/loss"):
        one, other = (points(tmp_path / run, metric) for run in ("folders", "table"))
        assert one == other and one, metric
    assert read(tmp_path / "table" / "classes.json") == ["cat", "dog"]
    trainer.run([*SMALL, "data=table", *typed, "max_steps=4", f"hydra.run.dir={tmp_path / 'part'}"])
    resumed = ("resume.allow_changes=true", f"resume.path={tmp_path / 'part'}")  # max_steps was 4
    trainer.run([*SMALL, "data=table", *typed, f"hydra.run.dir={tmp_path / 'rest'}", *resumed])
    assert points(tmp_path / "rest", "train/loss") == points(tmp_path / "table", "train/loss")


@pytest.mark.all
def test_two_workers_train_on_a_table_as_one_does(folder: Path, tmp_path: Path) -> None:
    path = written(folder / "both.csv", [*rows_of(folder, "train")])
    losses = []
    for workers in (1, 2):
        typed = [
            "data.batch_size=null",
            "data.global_batch_size=8",
            f"launch.nproc={workers}",
            "sampler=class_balanced",
        ]
        run = tmp_path / str(workers)
        # a process of its own: a forkserver that an earlier test has started would look into that test's cache
        done = command(*SMALL, "data=table", f"data.path={path}", *typed, f"hydra.run.dir={run}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(points(run, "train/loss"))
    assert losses[0] and losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_column_says_the_split_of_each_row(folder: Path) -> None:
    splits = {"train": "Training", "val": "dev", "test": "test"}
    rows = [(*row, name) for split, name in splits.items() for row in rows_of(folder, split)]
    random = np.random.default_rng(1).permutation(len(rows))
    path = written(folder / "split.csv", [rows[n] for n in random], ("image", "label", "part"))
    facts, found = opened(table(path, split="part"))
    assert (facts.train_samples, facts.val_samples, facts.test_samples) == (26, 10, 6)
    names = {found.train.sample_name(n) for n in range(26)}
    assert names == {row[0] for row in rows_of(folder, "train")}
    with pytest.raises(UserError, match=r"row 1 is of the split 'fold 3'"):
        written(folder / "odd.csv", [("a.png", "cat", "fold 3")], ("image", "label", "part"))
        table(folder / "odd.csv", split="part").facts(8)


def test_rows_are_held_out_as_images_of_folders_are(folder: Path) -> None:
    path = written(folder / "train_only.csv", rows_of(folder, "train"))
    facts, found = opened(table(path, val_fraction=0.3, split_seed=5))
    shutil.copytree(folder / "train", folder / "flat", dirs_exist_ok=True)
    other = ImageFolder(root=str(folder / "flat"), val_fraction=0.3, split_seed=5, image_size=16, cache="none")
    folders = opened(other)[1]
    assert [found.val.sample_name(n).removeprefix("train/") for n in range(facts.val_samples)] == [
        folders.val.sample_name(n) for n in range(facts.val_samples)
    ]


def shape(rows: list[Row], how: str, folder: Path) -> bytes:
    """The same table as a CSV file of another make."""
    comma, end = {"semicolons": (";", "\n"), "tabs": ("\t", "\n"), "crlf": (",", "\r\n")}.get(how, (",", "\n"))
    if how == "quotes":
        rows = [(f'"{image}"', f'"{label}"') for image, label in rows]
    if how == "absolute":
        rows = [(str(folder / image), label) for image, label in rows]
    if how == "windows":
        rows = [(image.replace("/", "\\"), label) for image, label in rows]
    text = end.join(comma.join(row) for row in [("image", "label"), *rows]) + ("" if how == "no last newline" else end)
    return (b"\xef\xbb\xbf" if how == "bom" else b"") + text.encode()


@pytest.mark.parametrize(
    "how", ["bom", "semicolons", "tabs", "crlf", "quotes", "absolute", "windows", "no last newline"]
)
def test_a_table_of_any_make_is_the_same_data(folder: Path, how: str) -> None:
    rows = rows_of(folder, "train")
    plain = table(written(folder / "plain.csv", rows))
    (folder / "made.csv").write_bytes(shape(rows, how, folder))
    made = table(folder / "made.csv")
    assert made.facts(8).classes == 2 and made.fingerprint(made.facts(8)) == plain.fingerprint(plain.facts(8))


def test_quoted_values_may_hold_what_separates_values(folder: Path, tmp_path: Path) -> None:
    for name in ('a, "big" cat.png', "dog;1.png"):
        shutil.copy(folder / "train/cat/00.png", tmp_path / name)
    rows = [('a, "big" cat.png', "cat, big"), ("dog;1.png", "dog\nsmall")] * 3
    source = table(written(tmp_path / "t.csv", rows))
    facts = source.facts(8)
    assert facts.classes == 2 and source.class_names(facts)[0] == "cat, big"
    assert "repeat an image of an earlier row: rows 1 and 3" in facts.attention


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "without rows": (b"image,label\n", "has no rows"),
    "another column": (b"img,label\na.png,cat\n", "has no column 'image'; its columns are 'img'; 'label'"),
    "two columns of a name": (b"image,label,label\na.png,cat,dog\n", "has 2 columns called 'label'"),
    "latin-1": ("image,label\na.png,cat\nb.png,k\xe4fer\n".encode("latin-1"), "is not UTF-8: line 3"),
    "utf-16": ("image,label\na.png,cat\n".encode("utf-16"), "is not UTF-8"),
    "a missing value": (b"image,label\na.png,cat\nb.png\n", "Expected 2 columns, got 1"),
    "missing files": (
        b"image,label\na.png,cat\nb.png,dog\n",
        "2 of 2 rows cannot be used: row 1: there is no file a.png",
    ),
    "cut short": (b"PAR1 and no more", "is no whole Parquet file"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    content, why = BROKEN[name]
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError) as caught:
        table(tmp_path / "t.csv").facts(8)
    assert why in caught.value.why and str(tmp_path / "t.csv") in caught.value.what


def test_rows_without_image_or_label_are_refused_or_left_out(folder: Path) -> None:
    rows = [*rows_of(folder, "train"), ("", "cat"), ("train/dog/00.png", ""), ("train/none.png", "dog")]
    path = written(folder / "bad.csv", rows)
    with pytest.raises(UserError) as caught:
        table(path).facts(8)
    assert "3 of 29 rows" in caught.value.why and "data.on_bad=skip" in caught.value.instead
    for said in ("row 27: it names no image", "row 28: it has no label", "row 29: there is no file train/none.png"):
        assert said in caught.value.why
    facts = table(path, on_bad="skip").facts(8)
    assert facts.train_samples + facts.val_samples == 26 and "row 29" in facts.attention


def test_whole_numbers_are_classes_as_they_are(folder: Path) -> None:
    rows = [(image, {"cat": 0, "dog": 2}[label]) for image, label in rows_of(folder, "train")]
    for name in ("n.csv", "n.parquet"):
        source = table(written(folder / name, rows))
        facts, found = opened(source)
        assert facts.classes == 3 and "1 of 3 labels are of no sample: 1" in facts.attention
        assert set(found.train.labels.tolist()) == {0, 2}
    with pytest.raises(UserError, match="label above 1"):
        table(folder / "n.csv", num_classes=2).facts(8)


def test_all_rows_of_one_label_and_classes_of_validation_alone_are_refused(folder: Path) -> None:
    rows = rows_of(folder, "train")
    with pytest.raises(UserError, match="have the label 0"):
        table(written(folder / "one.csv", [row for row in rows if row[1] == "cat"])).facts(8)
    cats = written(folder / "cats.csv", [*rows[:20], (rows[20][0], "bird")])
    with pytest.raises(UserError, match="not in the training images: bird"):
        table(written(folder / "both.csv", rows), val_path=str(cats)).facts(8)


NUMBERS = [((n * 7 % 10) / 4, n % 5 - 2) for n in range(26)]
SETS = ["|".join(name for bit, name in enumerate(("red", "big", "old")) if n >> bit & 1) for n in range(26)]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_and_sets_are_labels_of_their_tasks(folder: Path, suffix: str) -> None:
    images = [image for image, _ in rows_of(folder, "train")]
    rows = [(image, *numbers) for image, numbers in zip(images, NUMBERS, strict=True)]
    path = written(folder / f"numbers.{suffix}", rows, ("image", "x", "y"))
    row = {image: n for n, image in enumerate(images)}
    for label, expected in (("x", [x for x, _ in NUMBERS]), (["x", "y"], NUMBERS)):
        facts, found = opened(table(path, label=label))
        names = [found.train.sample_name(n) for n in range(facts.train_samples)]
        assert facts.task == "regression" and facts.classes == (1 if label == "x" else 2)
        truth = torch.tensor([expected[row[name]] for name in names], dtype=torch.float32)
        assert torch.equal(found.train.labels, truth)
    assert table(path, label="y").class_names(facts) == [] and table(path, label="x").class_names(facts) == ["x"]
    assert table(path, label="y", label_kind="number").facts(8).task == "regression"
    path = written(folder / f"sets.{suffix}", list(zip(images, SETS, strict=True)))
    facts, found = opened(source := table(path, label_separator="|"))
    assert facts.task == "multi_label" and source.class_names(facts) == ["big", "old", "red"]
    for n in range(facts.train_samples):
        members = {name for name, is_in in zip(source.class_names(facts), found.train.labels[n], strict=True) if is_in}
        assert "|".join(sorted(members)) == "|".join(sorted(SETS[row[found.train.sample_name(n)]].split("|")))


@pytest.mark.parametrize(
    ("label", "keys", "why"),
    [
        ("nan", {"label_kind": "number"}, "row 26: the label 'nan' is not finite"),
        ("tall", {"label_kind": "number"}, "no number"),
    ],
)
def test_labels_that_are_no_numbers_are_refused(folder: Path, label: str, keys: dict[str, str], why: str) -> None:
    rows = [(image, n) for n, (image, _) in enumerate(rows_of(folder, "train"))]
    with pytest.raises(UserError) as caught:
        table(written(folder / "wrong.csv", [*rows[:-1], (rows[-1][0], label)]), **keys).facts(8)
    assert why in caught.value.why


@pytest.mark.all
@pytest.mark.parametrize(("label", "metric"), [("x", "val/mae"), ("sets", "val/map")])
def test_a_run_learns_numbers_and_sets_of_a_table(folder: Path, tmp_path: Path, label: str, metric: str) -> None:
    rows = [
        (image, x, names) for (image, _), (x, _), names in zip(rows_of(folder, "train"), NUMBERS, SETS, strict=True)
    ]
    path = written(folder / "tasks.csv", rows, ("image", "x", "sets"))
    typed = [f"data.path={path}", f"data.label={label}", *(["data.label_separator='|'"] if label == "sets" else [])]
    trainer.run([*SMALL, "data=table", *typed, f"hydra.run.dir={tmp_path}"])
    assert len(points(tmp_path, metric)) == 2 and np.isfinite(points(tmp_path, metric)).all()


def test_a_column_of_the_table_weighs_the_samples(folder: Path) -> None:
    rows = [(*row, number % 3) for number, row in enumerate(rows_of(folder, "train"))]
    path = written(folder / "weights.csv", rows, ("image", "label", "weight"))
    ready(*SMALL, "data=table", f"data.path={path}", "sampler=weighted", "sampler.column=weight")
    train = opened(table(path))[1].train
    expected = {image: str(weight) for image, _, weight in rows}
    assert train.column("weight") == [expected[train.sample_name(n)] for n in range(len(train))]


@pytest.mark.all
def test_eval_and_predict_read_a_table(folder: Path, tmp_path: Path) -> None:
    train, val = (written(folder / f"{split}.csv", rows_of(folder, split)) for split in ("train", "val"))
    run = tmp_path / "run"
    trainer.run([*SMALL, "data=table", f"data.path={train}", f"data.val_path={val}", f"hydra.run.dir={run}"])
    done = command("eval", str(run), str(val), "tracking=none", f"hydra.run.dir={tmp_path / 'eval'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert points(tmp_path / "eval", "val/loss")[-1] == pytest.approx(points(run, "val/loss")[-1], rel=1e-9)
    output = tmp_path / "guesses.csv"
    done = command("predict", str(run), str(val), f"predict.output={output}", "tracking=none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        assert [row[0] for row in csv.reader(file)][1:] == [image for image, _ in rows_of(folder, "val")]
