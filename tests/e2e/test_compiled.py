"""compile=true gives the numbers of compile=false, in every mode of a parameter server and with every recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import points, trainer

CLICKS = "+recipe=wide_and_deep data.train_rows=2000 data.val_rows=500 data.batch_size=64 model.hidden=[8] model.table_size=5000 data.hash_size=5000"
MODES = ("pserver_sync", "pserver_async", "pserver_ssp", "pserver_geo strategy.k_steps=2")
EXACT = "execution.compile_backend=aot_eager"
"""The traced graph with torch's own kernels: what compile=true does around the code that it writes, bit by bit."""


def losses(folder: Path, line: str, compiled: str) -> tuple[list[float], list[float]]:
    """Training and validation losses of five updates."""
    argv = [*line.split(), compiled, "max_steps=5", "tracking=none", "checkpoint=none", "execution.log_every=1"]
    done = trainer(*argv, f"hydra.run.dir={folder}", cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return points(folder, "train/loss"), points(folder, "val/loss")


def compare(tmp_path: Path, line: str, exact: bool = True) -> None:
    """Compiled and eager runs of that line have equal losses: bit by bit, or within the rounding of other kernels."""
    eager = losses(tmp_path / "eager", line, "compile=false")
    found = losses(tmp_path / "compiled", f"{line} {EXACT}" if exact else line, "compile=true")
    assert len(eager[0]) == 5 and len(eager[1]) == 1
    assert found == eager if exact else [*found[0], *found[1]] == pytest.approx([*eager[0], *eager[1]], rel=2e-4)


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.long] * (m == "pserver_ssp")) for m in MODES])
def test_row_lookups_of_every_server_mode_stay_outside_the_compiled_graph(tmp_path: Path, mode: str) -> None:
    compare(tmp_path, f"{CLICKS} strategy={mode} launch.workers=1 launch.servers=2")


def test_inductor_s_kernels_train_on_servers_as_torch_s_own_do(tmp_path: Path) -> None:
    compare(tmp_path, f"{CLICKS} strategy=pserver_sync launch.workers=2", exact=False)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_inductor_in_every_server_mode(tmp_path: Path, mode: str) -> None:
    compare(tmp_path, f"{CLICKS} strategy={mode} launch.workers=1", exact=False)


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
