"""What the recipes learn on embedded data: a table, and the curves of 1, 2 and 4 workers beside each other.

    python benchmarks/results.py [--picture docs/results.png] [--only digits,mnist]

Each row is one command, which is printed; runs go one after the other into a temporary folder. The linear baseline is
scikit-learn's logistic regression on the same images, drawn smaller where they are large. Workers share the global
batch, so that their curves should lie on each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = (1, 2, 4)


@dataclass(frozen=True)
class Proof:
    """A recipe, what is changed of it, the pixels that the baseline sees, and the classes."""

    name: str
    overrides: tuple[str, ...]
    baseline_pixels: int
    classes: int


PROOFS = (
    Proof("digits", ("+recipe=digits_lenet", "data.global_batch_size=32", "data.batch_size=null"), 8, 10),
    Proof(
        "flowers",
        (
            "+recipe=resnet50_flowers",
            "data=embedded_flowers",
            "data.image_size=64",
            "optimizer.lr=0.02",
            "scheduler.warmup_epochs=1",
            "data.global_batch_size=32",
            "data.batch_size=null",
            "epochs=8",
        ),
        16,
        102,
    ),
    Proof(
        "CIFAR-shaped",
        ("+recipe=cifar10_convnet", "data.global_batch_size=32", "data.batch_size=null", "data.download=false"),
        32,
        10,
    ),
    Proof(
        "MNIST-shaped",
        (
            "+recipe=mnist_lenet",
            "data.global_batch_size=100",
            "data.batch_size=null",
            "data.download=false",
            "optimizer=momentum",
            "optimizer.lr=0.02",
        ),
        28,
        10,
    ),
)


def run(proof: Proof, workers: int, folder: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """The command, its result and its points."""
    overrides = [*proof.overrides, f"launch.nproc={workers}", "tracking=none"]
    where = folder / f"{proof.name}-{workers}"
    command = ["python", "-m", "trainer", *overrides]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run(
        [sys.executable, *command[1:], f"hydra.run.dir={where}"], check=True, cwd=folder, stdout=subprocess.DEVNULL
    )
    points = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return shlex.join(command), json.loads((where / "result.json").read_text()), points


def baseline(proof: Proof) -> float:
    """Validation accuracy of logistic regression on the same split."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from torch.nn.functional import interpolate

    from trainer.cli.compose import compose, hydra_app, plain
    from trainer.planning import validate

    with hydra_app() as app:
        checked = validate.check(plain(compose(app, list(proof.overrides))))
    splits = checked.source.open(checked.source.prepare(checked.facts, lambda *_: None))

    def pixels(dataset: Any) -> tuple[Any, Any]:
        everything = np.arange(len(dataset))
        images, labels = (
            dataset.augmented((0, 0), everything) if hasattr(dataset, "augmented") else dataset.batch(everything)
        )
        images = images.float() / (255 if images.max() > 1 else 1)
        size = (proof.baseline_pixels, proof.baseline_pixels)
        small = images if images.shape[-1] == size[0] else interpolate(images, size, mode="area")
        return small.flatten(1).numpy(), labels.numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(max_iter=300).fit(*pixels(splits.train))
    return float(model.score(*pixels(splits.val)))


def draw(curves: dict[str, dict[int, list[dict[str, Any]]]], path: Path) -> None:
    """A column for each proof: training loss above, validation accuracy below, a line for each number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(curves), figsize=(4 * len(curves), 6), squeeze=False)
    for column, (name, by_workers) in enumerate(curves.items()):
        for workers, points in by_workers.items():
            for row, key in enumerate(("train/loss", "val/acc1")):
                found = [(p["step"], p["metrics"][key]) for p in points if key in p["metrics"]]
                axes[row][column].plot(
                    *zip(*found, strict=True),
                    label=f"{workers} worker{'s' if workers > 1 else ''}",
                    marker="." if row else None,
                )
                axes[row][column].set(title=name if row == 0 else "", xlabel="update", ylabel=key)
                axes[row][column].grid(alpha=0.3)
        axes[0][column].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    chosen = [p for p in PROOFS if not arguments.only or p.name in arguments.only.split(",")]
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    curves: dict[str, dict[int, list[dict[str, Any]]]] = {}
    lines = ["| data | chance | linear | 1 worker | 2 workers | 4 workers |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for proof in chosen:
            reached = []
            for workers in WORKERS:
                _, result, points = run(proof, workers, Path(folder))
                curves.setdefault(proof.name, {})[workers] = points
                reached.append(f"{result['metrics']['val/acc1']:.3f}")
            lines.append(f"| {proof.name} | {1 / proof.classes:.3f} | {baseline(proof):.3f} | {' | '.join(reached)} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.picture:
        draw(curves, arguments.picture.absolute())


if __name__ == "__main__":
    main()
