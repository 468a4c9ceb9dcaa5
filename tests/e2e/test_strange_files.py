"""On the command line: strange names and files in what is looked at, and files that vanish while they are read."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from tests.pictures import encoded, image_folder, picture
from tests.runs import trainer

SMALL = [
    "+recipe=resnet50_imagefolder",
    "model=convnet",
    "~model.zero_init_residual",
    "data.image_size=32",
    "data.batch_size=4",
    "tracking=none",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures in ``d`` and a run in ``run``."""
    here = tmp_path_factory.mktemp("strange")
    root = image_folder(here / "d")
    (root / "train" / "daisy" / "loop").symlink_to("..")
    os.mkfifo(root / "train" / "rose" / "pipe.jpg")
    done = trainer(*SMALL, f"data.root={root}", "max_steps=2", f"hydra.run.dir={here / 'run'}", cwd=here, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "2 names are passed over" in said and "leads back to a folder" in said and "pipe.jpg is a FIFO" in said
    assert "18 training" in said
    return here


@pytest.mark.all
def test_a_table_is_written_whatever_lies_in_the_folder(trained: Path, tmp_path: Path) -> None:
    looked = tmp_path / "looked"
    looked.mkdir()
    for name in (b"a.jpg", b"b\xff.jpg", b"sub/c.jpg"):
        path = Path(os.fsdecode(os.fsencode(looked) + b"/" + name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(picture(0, 0)))
    os.mkfifo(looked / "pipe.jpg")
    (looked / "zero.png").symlink_to("/dev/zero")
    (looked / "gone.png").symlink_to("nowhere")
    for link in "xy":
        (looked / link).symlink_to(".")
    (looked / "empty.jpg").write_bytes(b"")
    (looked / os.fsdecode(b"bad\xfe.jpg")).write_bytes(b"no image")
    out = tmp_path / "out.csv"
    done = trainer(
        *SMALL,
        "mode=predict",
        f"data.root={trained / 'd'}",
        f"weights={trained / 'run'}",
        f"predict.input={looked}",
        f"predict.output={out}",
        "launch.nproc=2",
        "data.num_workers=1",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["file"]: row for row in csv.DictReader(out.open(encoding="utf-8"))}
    errors = {name: row["error"] for name, row in rows.items()}
    assert errors == {
        "a.jpg": "",
        "b\\xff.jpg": "",
        "sub/c.jpg": "",
        "pipe.jpg": "is a FIFO and not a regular file",
        "zero.png": "is a character device and not a regular file",
        "gone.png": "No such file or directory",
        "empty.jpg": "is empty (0 bytes)",
        "bad\\xfe.jpg": (
            "is no image of a kind that can be read (JPEG, PNG, WEBP, AVIF, GIF, BMP, TIFF, PPM), or its "
            "beginning is damaged"
        ),
    }
    assert len({tuple(list(row.values())[1:]) for name, row in rows.items() if not errors[name]}) == 1
    assert "passed over" in " ".join(done.stdout.split()) and "5 of 8 files could not" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.all
def test_an_image_that_breaks_in_training_is_one_sentence_with_two_workers_that_have_two_readers(
    tmp_path: Path,
) -> None:
    root = image_folder(tmp_path / "d")
    broken = root / "train" / "iris" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    done = trainer(
        *SMALL,
        f"data.root={root}",
        "data.cache=none",
        "epochs=1",
        "launch.nproc=2",
        "data.num_workers=2",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert f"{broken} cannot be read: " in said and "data.on_bad=skip leaves them out." in said
    assert "Traceback" not in said and "DataLoader worker" not in said
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_a_run_that_names_its_classes_wrongly_is_refused(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("model.safetensors", "config.yaml", "plan.json"):
        (run / name).write_bytes((trained / "run" / name).read_bytes())
    from trainer.errors import UserError
    from trainer.planning.eval_and_predict import class_names_of

    for content in ("garbage", '{"a": 1}', "[" * 200_000, "[1, 2]"):
        (run / "classes.json").write_text(content)
        with pytest.raises(UserError, match=r"classes\.json does not hold the names of the classes"):
            class_names_of(run / "model.safetensors")
