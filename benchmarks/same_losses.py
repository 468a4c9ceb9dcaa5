"""Whether a change leaves results as they were: the losses of a commit and of this tree, under fixed seeds.

    python benchmarks/same_losses.py COMMIT [--steps 20] [--only NAME]

Each case trains a few updates with the code of the commit (in a work tree of its own) and with this one, in the same
environment, and compares every number of ``metrics.jsonl`` under ``train/`` and ``val/``. Several workers on a
parameter server that go their own ways (async, ssp, geo) run with one worker: with several, no two runs are alike. Exit
code 1 if a number differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ("+recipe=digits_lenet", "precision=fp32")
CLICKS = ("+recipe=wide_and_deep", "data.batch_size=64", "data.train_rows=4096", "data.val_rows=512")
TWO = "launch.nproc=2"
SERVER = ("launch.servers=2", "launch.workers=1")
CASES: dict[str, tuple[str, ...]] = {
    "digits, single": DIGITS,
    "digits, bf16 in channels_last": ("+recipe=digits_lenet", "precision=bf16", "execution.channels_last=true"),
    "digits, collective": (*DIGITS, TWO),
    "digits, collective, merge 2": (*DIGITS, TWO, "strategy.gradient_merge.k_steps=2"),
    "digits, local_sgd": (*DIGITS, TWO, "strategy=local_sgd"),
    "digits, ema": (*DIGITS, "ema.decay=0.9"),
    "digits, pserver_sync": (*DIGITS, "strategy=pserver_sync", "launch.servers=2", "launch.workers=2"),
    "digits, pserver_async": (*DIGITS, "strategy=pserver_async", *SERVER),
    "digits, pserver_ssp": (*DIGITS, "strategy=pserver_ssp", *SERVER),
    "digits, pserver_geo": (*DIGITS, "strategy=pserver_geo", *SERVER),
    "clicks, single": (*CLICKS, "strategy=single", "launch.workers=1"),
    "clicks, pserver_sync": (*CLICKS, "strategy=pserver_sync", "launch.servers=2", "launch.workers=2"),
    "clicks, pserver_async": (*CLICKS, "strategy=pserver_async", *SERVER),
    "clicks, pserver_geo": (*CLICKS, "strategy=pserver_geo", *SERVER),
    "random images, ResNet-50": (
        "+recipe=resnet50_random",
        "data.image_size=32",
        "data.batch_size=4",
        "precision=fp32",
    ),
}


def numbers(tree: Path, case: tuple[str, ...], steps: int, folder: Path) -> list[tuple[int, str, float]]:
    """(update, metric, value) of every line of a run; what the run said, where it failed."""
    more = (
        f"max_steps={steps}",
        "execution.log_every=1",
        "limit_val_batches=2",
        "tracking=none",
        "execution.threads=1",
        f"hydra.run.dir={folder}",
    )
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *case, *more], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(case)}\n{(done.stderr or done.stdout)[-2000:]}")
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (p["step"], name, value)
        for p in points
        for name, value in p["metrics"].items()
        if name.startswith(("train/", "val"))
    ]


def difference(before: list[tuple[int, str, float]], now: list[tuple[int, str, float]]) -> str:
    """Return the first number that is not as it was, or ''. A metric that there was not before is no difference."""
    new = {(step, name): value for step, name, value in now}
    for step, name, value in before:
        if new.get((step, name)) != value:
            return f"{name} at update {step}: {value} before, {new.get((step, name))} now"
    return "" if before else "no numbers"


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", before, arguments.commit], cwd=ROOT, check=True
        )
        try:
            print(f"{'case':32} {'numbers':>8}  last loss   against {arguments.commit}")
            for name, case in CASES.items():
                if arguments.only not in name:
                    continue
                found = [
                    numbers(tree, case, arguments.steps, Path(scratch) / f"{list(CASES).index(name)}-{n}")
                    for n, tree in enumerate((before, ROOT))
                ]
                first = difference(*found)
                differ += bool(first)
                added = sorted({name for _, name, _ in found[1]} - {name for _, name, _ in found[0]})
                loss = [value for _, metric, value in found[1] if metric == "train/loss"][-1]
                print(
                    f"{name:32} {len(found[1]):8}  {loss:.7f}   {first or ', new: '.join(['identical', *added])}",
                    flush=True,
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
