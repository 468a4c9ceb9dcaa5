"""The embedded flowers: the same bytes always, a whole set or none, and no class told by its mean colour."""

import errno
import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pace import wait_for
from trainer.data import prepared
from trainer.data.drawn_flowers import draw
from trainer.data.drawn_flowers.draw import Drawing
from trainer.data.drawn_flowers.painter import paint
from trainer.data.drawn_flowers.species import class_names, species

HOME = Path(draw.__file__).resolve().parents[3]
SMALL = Drawing(per_class=2, size=96, classes=6)
ASK = "from trainer.data.drawn_flowers.draw import Drawing, draw; print(draw({arguments}))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}


def ask(arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Another process that asks for a set, with no main guard and PYTHONPATH the only way to the package."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-c", ASK.format(arguments=arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def test_the_set_has_the_layout_counts_and_sizes_promised() -> None:
    assert not draw.is_drawn(SMALL)
    root = draw.draw(SMALL)
    assert root == draw.folder(SMALL) and draw.is_drawn(SMALL)
    expected = {f"{s}/{c:03d}/{i:02d}.jpg" for s in ("train", "val") for c in range(0, 102, 17) for i in range(2)}
    assert set(contents(root)) == expected
    for content in contents(root).values():
        with Image.open(io.BytesIO(content)) as picture:
            assert picture.format == "JPEG" and picture.mode == "RGB"
            assert min(picture.size) == 96 and max(picture.size) <= 120
    assert [path.name for path in root.parent.iterdir() if "part" in path.name] == []


def test_the_same_bytes_come_from_any_number_of_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = contents(draw.draw(SMALL, processes=1))
    monkeypatch.setenv("TRAINER_CACHE", str(cache / "other"))
    assert contents(draw.draw(SMALL, processes=3)) == one


def test_a_picture_depends_on_seed_split_class_and_index_alone() -> None:
    root = draw.draw(SMALL)
    label, index = 68, 1  # the fifth of six classes
    for split, name in enumerate(("train", "val")):  # drawn here on its own, out of order
        rng = np.random.default_rng([draw.VERSION, 0, split, label, index])
        buffer = io.BytesIO()
        paint(species()[label], 96, rng).save(buffer, "JPEG", quality=88)
        assert (root / name / "068" / "01.jpg").read_bytes() == buffer.getvalue()


def test_no_two_pictures_are_the_same() -> None:
    first = list(contents(draw.draw(SMALL)).values())
    other_seed = list(contents(draw.draw(replace(SMALL, seed=1))).values())
    assert len(set(first + other_seed)) == 2 * 24


def test_progress_counts_up_to_the_total_and_a_whole_set_is_not_drawn_again() -> None:
    seen: list[tuple[int, int]] = []
    draw.draw(SMALL, processes=2, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 24) for done in range(1, 25)]
    draw.draw(SMALL, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 24


def test_two_processes_asking_at_once_get_one_whole_set() -> None:
    noisy = "Drawing(classes=6, per_class=8, size=96), on_progress=lambda d, t: print('.')"
    answers = [process.communicate(timeout=600)[0].split() for process in [ask(noisy), ask(noisy)]]
    root = draw.folder(Drawing(classes=6, per_class=8, size=96))
    assert [answer[-1] for answer in answers] == [str(root)] * 2
    assert sorted(answer.count(".") for answer in answers) == [0, 96]
    assert len(contents(root)) == 96


def test_it_draws_from_a_folder_whose_files_shadow_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('the wrong numpy')")
    (tmp_path / "script.py").write_text(ASK.format(arguments="Drawing(classes=1, per_class=1, size=32)"))
    environment = {**os.environ, "PYTHONPATH": str(HOME), "TRAINER_CACHE": "relative"}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, check=True, timeout=600)
    assert len(contents(tmp_path / "relative")) == 2


def test_a_half_drawn_leftover_is_replaced() -> None:
    target = draw.folder(SMALL)
    leftover = target.parent / f"{target.name}.part-1-dead"
    for half in (target, leftover):
        (half / "train" / "000").mkdir(parents=True)
        (half / "train" / "000" / "99.jpg").write_bytes(b"half a picture")
    assert not draw.is_drawn(SMALL)
    root = draw.draw(SMALL)
    assert len(contents(root)) == 24 and "train/000/99.jpg" not in contents(root)
    assert not leftover.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_dies_takes_its_painters_along_and_leaves_no_set(how: signal.Signals, cache: Path) -> None:
    process = ask(
        "Drawing(size=480), processes=2, on_progress=lambda d, t: print('.', flush=True)", stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stdout.readline() == ".\n"
    painters = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(painters) == 2
    process.send_signal(how)
    process.wait(timeout=600)
    wait_for(lambda: not any(_alive(painter) for painter in painters), 10, "the painters end")
    assert not draw.is_drawn(Drawing(size=480))
    if how == signal.SIGINT:
        assert list(cache.rglob("*.jpg")) == []
    process.stdout.close()


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_cache_that_cannot_be_written_is_an_oserror_with_its_path(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="cache"):
        draw.draw(SMALL)


def test_a_write_that_fails_reaches_the_caller_as_an_oserror_with_the_pictures_path(cache: Path) -> None:
    code = """
import resource
from trainer.data.drawn_flowers.draw import Drawing, draw
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # bytes; the painters inherit it, as they would a full disk
try:
    draw(Drawing(per_class=2, size=400, classes=6), processes=2)
except OSError as error:
    print(error.errno, error.filename)
"""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    number, path = done.stdout.split()
    assert int(number) == errno.EFBIG and path.startswith(str(cache)) and path.endswith(".jpg")
    assert list(cache.rglob("*.jpg")) == []


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"per_class": 0}, {"size": 4}, {"classes": 103}])
def test_an_argument_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Drawing(**wrong)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepared.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("TRAINER_CACHE")
    assert prepared.cache_root() == tmp_path / "xdg" / "trainer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepared.cache_root() == Path.home() / ".cache" / "trainer"


def test_every_set_has_a_folder_of_its_own() -> None:
    variants: list[dict[str, Any]] = [{}, {"seed": 1}, {"per_class": 2}, {"size": 96}, {"classes": 6}]
    assert len({draw.folder(Drawing(**variant)) for variant in variants}) == len(variants)


def test_the_102_names_are_distinct_and_so_are_the_classes() -> None:
    assert len(class_names()) == len(set(class_names())) == 102
    assert len(set(species())) == draw.CLASSES == 102


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, trainer.data.drawn_flowers.draw; print({'numpy', 'PIL', 'torch'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.all
def test_the_mean_colour_does_not_tell_the_class() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    root = draw.draw(Drawing(per_class=4, size=32))

    def means(split: str) -> tuple[np.ndarray, np.ndarray]:
        paths = sorted((root / split).rglob("*.jpg"))
        features = np.array([np.asarray(Image.open(path), np.float64).mean((0, 1)) for path in paths])
        return features, np.array([int(path.parent.name) for path in paths])

    (train_x, train_y), (val_x, val_y) = means("train"), means("val")
    middle, spread = train_x.mean(0), train_x.std(0)
    model = linear.LogisticRegression(max_iter=500).fit((train_x - middle) / spread, train_y)
    # Chance is 0.01, a small ResNet reaches 0.15 and more, and a colour that each class adds, of half the spread, 0.07.
    assert model.score((val_x - middle) / spread, val_y) < 0.045


def test_fewer_classes_are_different_families_and_their_pictures_those_of_the_whole_set() -> None:
    few = draw.draw(Drawing(per_class=1, size=32, classes=34), processes=1)
    names = sorted(path.name for path in (few / "val").iterdir())
    assert names == [f"{number:03d}" for number in range(0, 102, 3)]  # a family has three neighbours
    kinds = species()
    first, other = kinds[0], kinds[3]
    traits = ("colour", "shape", "petals", "pattern", "centre", "layers")
    assert sum(getattr(first, trait) != getattr(other, trait) for trait in traits) > 1
    assert class_names(34) == class_names()[::3]
    fewer = draw.draw(Drawing(per_class=1, size=32, classes=17), processes=1)
    shared = {"train/000/00.jpg", "val/096/00.jpg"}
    assert all((few / path).read_bytes() == (fewer / path).read_bytes() for path in shared)
