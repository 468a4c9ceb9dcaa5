"""What checkpoints cost: ``python benchmarks/checkpoint.py``.

ResNet-50 on drawn images, SGD with momentum. Runs with and without checkpoints take turns; medians are compared: how
long the training waits for a checkpoint, how much a write in the background slows it down, bytes on the disk against
those of parameters, buffers and momentum, ``torch.save`` of the same, and the time until the first update of a run that
goes on against one that begins.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

UPDATES, EVERY = 24, 6
RUN = (
    sys.executable,
    "-m",
    "trainer",
    "+recipe=resnet50_random",
    "tracking=none",
    "data.batch_size=16",
    "optimizer.momentum=0.9",
    f"max_steps={UPDATES}",
    "execution.log_every=1",
    "execution.val_every=0",
    "limit_val_batches=1",
)
WAITED = re.compile(r"(\d+\.\d) MB, written in (\d+\.\d+) s; the training waited (\d+\.\d+) s")
DEFAULT_S = 600.0
"""Between two checkpoints of the default rhythm, within an epoch."""


def run(folder: Path, *overrides: str) -> tuple[float, float]:
    """Seconds of the training after its first update, and from the start of the process to the first update's line."""
    began, first = time.perf_counter(), 0.0
    process = subprocess.Popen([*RUN, f"hydra.run.dir={folder}", *overrides], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[Epoch") and not first:
            first = time.perf_counter() - began
    if process.wait():
        raise SystemExit(f"the run in {folder} failed")
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [point["time"] for point in points if "train/loss" in point["metrics"]]
    return (times[-1] - times[0]) / 1e3, first


def least(folder: Path) -> int:
    """Bytes of what a model, its buffers and its momentum are made of."""
    with safe_open(folder / "worker-0.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        return sum(
            file.get_tensor(name).nbytes
            for name in file.keys()  # noqa: SIM118
            if name.startswith(("model.", "buffers.", "strategy."))
        )


def torch_saves(folder: Path, scratch: Path) -> float:
    """Seconds of ``torch.save`` and fsync of the same tensors."""
    with safe_open(folder / "worker-0.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    began = time.perf_counter()
    with (scratch / "state.pt").open("wb") as out:
        torch.save(tensors, out)
        out.flush()
        subprocess.run(["sync", str(scratch / "state.pt")], check=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    plain, kept, fresh, again, waited, written = [], [], [], [], [], []
    scratch = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        for number in range(rounds):
            folder = scratch / str(number)
            seconds, first = run(folder / "plain", "checkpoint=none")
            plain.append(seconds)
            fresh.append(first)
            seconds, _ = run(folder / "kept", f"checkpoint.every_steps={EVERY}")
            kept.append(seconds)
            log = (folder / "kept" / "workerlog.0").read_text()
            told = [tuple(map(float, found)) for found in WAITED.findall(log)]
            written += [seconds for _, seconds, _ in told]
            waited += [seconds for _, _, seconds in told]
            status = folder / "kept" / "status.json"
            status.write_text(status.read_text().replace('"done"', '"killed"'))
            shutil.rmtree(sorted((folder / "kept" / "checkpoints").glob("step-*"))[-1])
            _, first = run(folder / "kept", f"checkpoint.every_steps={EVERY}", "resume=auto")
            again.append(first)
        newest = sorted((scratch / "0" / "kept" / "checkpoints").glob("step-*"))[-1]
        size = sum(path.stat().st_size for path in newest.iterdir())
        saves = statistics.median(torch_saves(newest, scratch) for _ in range(rounds))
        show(plain, kept, fresh, again, waited, written, size / least(newest), saves)
    finally:
        shutil.rmtree(scratch)


def show(
    plain: list[float],
    kept: list[float],
    fresh: list[float],
    again: list[float],
    waited: list[float],
    written: list[float],
    size: float,
    saves: float,
) -> None:
    """The table."""
    median = statistics.median
    step, count = median(plain) / (UPDATES - 1), (UPDATES - 1) // EVERY
    slowed = (median(kept) - median(plain)) / count
    table = Table(
        "what", "measured", title=f"ResNet-50, batch 16, {UPDATES} updates, a checkpoint every {EVERY}, medians"
    )
    table.add_row("an update", f"{step:.2f} s")
    table.add_row("the training waits for a copy", f"{median(waited):.3f} s ({median(waited) / step:.0%} of an update)")
    table.add_row(
        "a checkpoint costs the training in all",
        f"{slowed:.2f} s ({slowed / DEFAULT_S:.2%} of the time, one in 10 minutes)",
    )
    table.add_row(
        "written and on the disk after", f"{median(written):.2f} s (torch.save of the same and sync: {saves:.2f} s)"
    )
    table.add_row("bytes against parameters, buffers and momentum", f"{size:.3f}")
    table.add_row(
        "first update of a run that goes on / that begins",
        f"{median(again):.1f} s / {median(fresh):.1f} s = {median(again) / median(fresh):.2f}",
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
