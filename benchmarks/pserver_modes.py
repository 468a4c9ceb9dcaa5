"""What the modes of the parameter server cost in quality, and what a slow worker costs in time; called by pserver.py.

Every case is a run of the recipe by its own command in a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from trainer.models.wide_and_deep import WideAndDeep

MODES = ("sync", "async", "ssp", "geo")
RECIPE = ("+recipe=wide_and_deep", "tracking=none", "hydra.run.dir=run")
SLOWER = 4
SLOW_RANK = "1"
DENSE = (
    ("collective", ("optimizer=momentum",)),
    ("pserver_sync", ("optimizer=momentum",)),
    ("pserver_async", ("optimizer=sgd", "optimizer.lr={async_lr}")),
    ("pserver_geo", ("optimizer=momentum", "strategy.k_steps=10")),
)
"""Staleness acts as momentum does: async does without."""
TARGET = 0.77
"""AUC over 100 batches that have just been trained on; the teacher's is 0.794."""


class Straggling(WideAndDeep):
    """Worker 1 sleeps three times as long as it has computed since the forward before: it is 4 times slower."""

    before = 0.0

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """As the recipe's model."""
        if self.training and os.environ.get("RANK") == SLOW_RANK:
            now = time.thread_time()
            if self.before:
                time.sleep((SLOWER - 1) * (now - self.before))
            self.before = time.thread_time()
        return super().forward(inputs)


class DigitsResNet18(nn.Module):
    """torchvision's ResNet-18 on digits (N, 1, 8, 8), drawn larger by 2 and in three equal colours."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.net = resnet18(num_classes=num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, num_classes)."""
        large = F.interpolate(images, scale_factor=2, mode="bilinear", antialias=False)
        logits: torch.Tensor = self.net(large.expand(-1, 3, -1, -1))
        return logits


def run(
    overrides: list[str], recipe: tuple[str, ...] = RECIPE
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[int, int]]:
    """One run: its result, its points, and how many pushes had which staleness, over all servers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", *recipe, *overrides]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}
        )
        made = Path(folder) / "run"
        points = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        staleness: dict[int, int] = {}
        for server in made.glob("server.*.json"):
            for steps, pushes in json.loads(server.read_text())["staleness"].items():
                staleness[int(steps)] = staleness.get(int(steps), 0) + pushes
        return json.loads((made / "result.json").read_text()), points, staleness


def parity(seeds: int, workers: tuple[int, ...] = (1, 2, 4), found: Path = Path("parity.jsonl")) -> None:
    """AUC of every mode against one process's, seed by seed. What ``found`` holds already is not run again."""
    done = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    for seed in range(1, seeds + 1):
        for mode, count in [("single", 1), *((m, w) for w in workers for m in MODES)]:
            if count == 1 and mode in ("sync", "ssp", "geo") and seed > 1:
                continue  # tests prove these equal to one process; the first seed shows it
            if any((d["mode"], d["workers"], d["seed"]) == (mode, count, seed) for d in done):
                continue
            strategy = (
                [f"strategy=pserver_{mode}", f"launch.workers={count}"] if mode != "single" else ["strategy=single"]
            )
            if mode in ("sync", "geo"):  # these average their workers: all of them together make one update of 512 rows
                strategy.append("data.global_batch_size=512")
            result, _, staleness = run([*strategy, f"seed={seed}"])
            done.append(
                {
                    "mode": mode,
                    "workers": count,
                    "seed": seed,
                    "auc": result["metrics"]["val/auc"],
                    "share": result["metrics"]["val/auc_share"],
                    "staleness": staleness,
                }
            )
            with found.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(f"seed {seed}, {mode}, {count} worker(s): AUC {done[-1]['auc']:.5f}", flush=True)
    table = Table(
        "mode", "workers", "seeds", "AUC", "minus one process", "the worst seed", "share of the way", "staleness"
    )
    single = {d["seed"]: d["auc"] for d in done if d["mode"] == "single"}
    for mode, count in [("single", 1), *((m, w) for m in MODES for w in workers)]:
        runs = [d for d in done if (d["mode"], d["workers"]) == (mode, count)]
        if not runs:
            continue
        aucs = [d["auc"] for d in runs]
        against = [d["auc"] - single[d["seed"]] for d in runs]
        share = statistics.mean(d["share"] for d in runs)
        table.add_row(
            mode,
            str(count),
            str(len(runs)),
            f"{statistics.mean(aucs):.4f}",
            f"{statistics.mean(against):+.4f}",
            f"{max(against, key=abs):+.4f}",
            f"{share:.3f}",
            histogram([d["staleness"] for d in runs]),
        )
    Console(width=150).print(table)


def histogram(runs: list[Mapping[Any, int]]) -> str:
    """Shares of pushes by staleness: ``0-1 64%, 2-3 33%, ...``"""
    bounds = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 1 << 60))
    total = sum(sum(r.values()) for r in runs)
    if not total:
        return ""
    parts = []
    for low, high in bounds:
        share = sum(n for r in runs for s, n in r.items() if low <= int(s) <= high) / total
        name = str(low) if low == high else f"{low}+" if high > 1000 else f"{low}-{high}"
        parts += [f"{name}: {share:.0%}"] if share >= 0.005 else []
    return ", ".join(parts)


def straggler(picture: Path = Path("straggler.png")) -> None:
    """Training AUC against time with one worker of two 4 times slower, as a picture and as seconds to an AUC."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for mode in MODES:
        overrides = [
            f"strategy=pserver_{mode}",
            "launch.workers=2",
            "model._target_=pserver_modes.Straggling",
            "epochs=1",
            *(["data.global_batch_size=512"] if mode == "sync" else []),
        ]
        result, points, _ = run(overrides)
        trained = [(p["time"] / 1000, p["metrics"]["train/auc"]) for p in points if "train/auc" in p["metrics"]]
        began = trained[0][0]  # the first batch is done
        times, aucs = [t - began for t, _ in trained[1:]], [a for _, a in trained[1:]]
        reached = next((t for t, a in zip(times, aucs, strict=True) if a >= TARGET), None)
        when = f"{reached:.1f} s" if reached is not None else "not"
        print(f"{mode}: training AUC {TARGET} {when}; val AUC {result['metrics']['val/auc']:.4f} in {times[-1]:.1f} s")
        axes.plot(times, aucs, marker=".", label=mode)
    axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds since the first batch", ylabel="training AUC over 100 batches", ylim=(0.65, 0.8))
    axes.set_title("Wide & Deep, 2 workers, one of them 4 times slower")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    print(f"drawn in {picture}")


def dense(seeds: int = 2) -> None:
    """Validation accuracy of LeNet and ResNet-18 on digits with 2 workers, in every mode against collective."""
    plain = ("+recipe=digits_lenet", "tracking=none", "hydra.run.dir=run", "launch.nproc=2")
    resnet = (
        "model=lenet",
        "model._target_=pserver_modes.DigitsResNet18",
        "~model.image_size",
        "~model.in_channels",
        "epochs=6",
        "data.batch_size=16",
        "optimizer.lr=0.01",
        "precision=fp32",
    )
    table = Table("model", "strategy", "optimizer", "seeds", "val acc1", "minus collective")
    for name, model, async_lr in (("LeNet", (), 0.2), ("ResNet-18", resnet, 0.05)):
        base = 0.0
        for strategy, keys in DENSE:
            extra = [key.format(async_lr=async_lr) for key in keys]
            accuracies = []
            for seed in range(1, seeds + 1):
                result, _, _ = run([f"strategy={strategy}", *model, *extra, f"seed={seed}"], plain)
                accuracies.append(result["best"]["val/acc1"])
            mean = statistics.mean(accuracies)
            base = mean if strategy == "collective" else base
            print(f"{name}, {strategy}: {mean:.4f}", flush=True)
            table.add_row(name, strategy, extra[0], str(seeds), f"{mean:.4f}", f"{100 * (mean - base):+.2f} points")
    Console(width=120).print(table)
