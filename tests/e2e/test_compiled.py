"""compile=true gives the numbers of compile=false, in every mode of a parameter server and with every recipe."""

from __future__ import annotations

import getpass
import json
import stat
import tempfile
from pathlib import Path

import pytest

import trainer as package
from tests.runs import SMALL, points, trainer

CLICKS = (
    "+recipe=wide_and_deep data.train_rows=2000 data.val_rows=500 data.batch_size=64 model.hidden=[8] "
    "model.table_size=5000 data.hash_size=5000"
)
MODES = ("pserver_sync", "pserver_async", "pserver_ssp", "pserver_geo strategy.k_steps=2")
EXACT = "execution.compile_backend=aot_eager"
"""The traced graph with torch's own kernels: what compile=true does around the code that it writes, bit by bit."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache. Inductor's headers and what this CPU can do are compiled into it once, which takes half a
    minute."""
    return tmp_path_factory.mktemp("cache")


def losses(folder: Path, line: str, compiled: str, **extra: str) -> tuple[list[float], list[float]]:
    """Training and validation losses of five updates."""
    argv = [*line.split(), compiled, "max_steps=5", "tracking=none", "checkpoint=none", "execution.log_every=1"]
    done = trainer(*argv, f"hydra.run.dir={folder}", cwd=folder.parent, **extra)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return points(folder, "train/loss"), points(folder, "val/loss")


def compare(tmp_path: Path, line: str, cache: Path | None = None) -> None:
    """Compiled and eager runs of that line have equal losses: bit by bit, or with inductor, whose code goes to that
    cache, within the rounding of its kernels."""
    eager = losses(tmp_path / "eager", line, "compile=false")
    if cache is None:
        found = losses(tmp_path / "compiled", f"{line} {EXACT}", "compile=true")
    else:
        found = losses(tmp_path / "compiled", line, "compile=true", TRAINER_CACHE=str(cache))
    assert len(eager[0]) == 5 and len(eager[1]) == 1
    assert (
        found == eager if cache is None else [*found[0], *found[1]] == pytest.approx([*eager[0], *eager[1]], rel=2e-4)
    )


@pytest.mark.all
@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.long] * (m != "pserver_async")) for m in MODES])
def test_row_lookups_of_every_server_mode_stay_outside_the_compiled_graph(tmp_path: Path, mode: str) -> None:
    compare(tmp_path, f"{CLICKS} strategy={mode} launch.workers=1 launch.servers=2")


@pytest.mark.long
def test_inductor_s_code_equals_eager_and_goes_to_a_cache_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, compiled = tmp_path / "common", cache / "compiled"
    theirs = common / f"torchinductor_{getpass.getuser()}"  # as another user could make it before us
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(common))
    monkeypatch.setenv("TRAINER_CACHE", str(cache))
    before, losses = set(compiled.rglob("*.so")), {}
    for choice in ("true", "false"):
        argv = [*SMALL, "max_steps=4", "execution.log_every=1", "tracking=none", f"compile={choice}"]
        model = ["model._target_=tests.e2e.own_models.Mlp", "~model.in_channels", "~model.image_size"]
        package.run([*argv, *model, f"hydra.run.dir={tmp_path}/{choice}"])
        losses[choice] = points(tmp_path / choice, "train/loss")
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
    assert json.loads((tmp_path / "true" / "plan.json").read_text())["length"]["total_steps"] == 4
    assert [path.name for path in common.rglob("*")] == [theirs.name], "nothing in the common temporary folder"
    assert stat.S_IMODE(compiled.stat().st_mode) == 0o700 and set(compiled.rglob("*.so")) > before


@pytest.mark.long
def test_inductor_s_kernels_train_on_servers_as_torch_s_own_do(cache: Path, tmp_path: Path) -> None:
    compare(tmp_path, f"{CLICKS} strategy=pserver_sync launch.workers=2", cache)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_inductor_in_every_server_mode(cache: Path, tmp_path: Path, mode: str) -> None:
    compare(tmp_path, f"{CLICKS} strategy={mode} launch.workers=1", cache)


SMALL_IMAGES = "data.batch_size=8 limit_val_batches=2"
DIGITS = "+recipe=digits_lenet data.batch_size=8"


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        f"{CLICKS} strategy=single",
        f"{CLICKS} strategy=collective launch.nproc=2",
        f"{CLICKS} strategy=local_sgd launch.nproc=2",
        f"{CLICKS} strategy=pserver_sync launch.workers=2 precision=fp64",
        f"{CLICKS} strategy=pserver_sync launch.workers=2 precision=bf16",
        f"{CLICKS} strategy=pserver_sync launch.workers=2 strategy.gradient_merge.k_steps=2",
        f"{DIGITS} strategy=collective launch.nproc=2",
        f"{DIGITS} strategy=local_sgd launch.nproc=2",
        f"{DIGITS} strategy=pserver_sync launch.workers=2",
        f"{DIGITS} precision=fp64",
        f"{DIGITS} precision=bf16",
        f"{DIGITS} strategy.gradient_merge.k_steps=2",
        f"+recipe=mnist_lenet {SMALL_IMAGES}",
        f"+recipe=mnist_lenet {SMALL_IMAGES} loss=squared_error",
        f"+recipe=cifar10_convnet {SMALL_IMAGES}",
        f"+recipe=resnet50_random {SMALL_IMAGES} data.image_size=32 model=resnet18",
        f"+recipe=resnet50_flowers_demo {SMALL_IMAGES} data.image_size=32 model=resnet18",
    ],
)
def test_compiled_equals_eager_with_every_recipe_and_kind_of_arithmetic(tmp_path: Path, line: str) -> None:
    compare(tmp_path, line)
