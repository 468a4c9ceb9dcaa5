"""How long until an answer: ``python benchmarks/startup.py``.

Commands that only look at the config stand beside ``import hydra``, one epoch of digits beside a bare script of torch,
sweeps beside their first job, 8 and 16 workers beside 2. The commands run in turn, round after round, so that a busy
machine slows all of them alike; medians are compared.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 7
TRAINER = (sys.executable, "-m", "trainer")
DIGITS = "+recipe=digits_lenet"
COMMANDS: dict[str, tuple[str, ...]] = {
    'python -c "import hydra"': (sys.executable, "-c", "import hydra"),
    "--help": (*TRAINER, "--help"),
    f"{DIGITS} --cfg job": (*TRAINER, DIGITS, "--cfg", "job"),
    f"{DIGITS} --cfg job --resolve": (*TRAINER, DIGITS, "--cfg", "job", "--resolve"),
    f"{DIGITS} --info defaults": (*TRAINER, DIGITS, "--info", "defaults"),
    "shell completion of +recipe=": (*TRAINER, "-sc", "query=bash"),
    "an unknown key": (*TRAINER, DIGITS, "epoch=3"),
    "an unknown option": (*TRAINER, DIGITS, "optimizer=sgdd"),
    "an unknown name in torch.optim": (*TRAINER, DIGITS, "optimizer._target_=torch.optim.SDG"),
    "an unknown torchvision model": (*TRAINER, DIGITS, "model._target_=torchvision.models.resnet5O"),
    "a batch larger than the data": (*TRAINER, DIGITS, "data.batch_size=2000"),
}


def seconds(command: tuple[str, ...], folder: str) -> float:
    """One run, from start to end."""
    began = time.perf_counter()
    environment = {**os.environ, "COMP_LINE": "trainer +recipe="}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return time.perf_counter() - began


BARE = """
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
model = nn.Sequential(
    nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(80, 10),
)
optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), nn.CrossEntropyLoss()
for batch in torch.randperm(1438).split(32):
    optimizer.zero_grad()
    loss(model(images[batch]), labels[batch]).backward()
    optimizer.step()
with torch.no_grad():
    print((model(images[1438:]).argmax(1) == labels[1438:]).float().mean())
torch.save(model.state_dict(), "model.pt")
"""
"""What people write for one epoch of digits."""
ONE, NONE = (*TRAINER, DIGITS, "epochs=1"), "tracking=none"
MANY = (2, 8, 16)
TRAININGS: dict[str, tuple[str, ...]] = {
    "a bare script": (sys.executable, "-c", BARE),
    "epochs=1 tracking=none": (*ONE, NONE),
    "epochs=1": ONE,
    **{
        f"-m {seeds}{how}{where}": (*ONE, "-m", seeds, *how.split(), *where.split())
        for seeds, how, where in itertools.product(
            ("seed=1", "seed=1,2,3,4,5"), ("", " launch.nproc=2"), (" tracking=none", "")
        )
        if not how or where
    },
    **{f"launch.nproc={n} tracking=none": (*ONE, NONE, f"launch.nproc={n}", "data.batch_size=8") for n in MANY},
}


def medians(commands: dict[str, tuple[str, ...]], rounds: int) -> dict[str, float]:
    """Seconds of each command, the median of so many rounds in which all take turns, after one that fills the
    caches."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, command in commands.items():
                passed = seconds(command, folder)
                if number:
                    taken[name].append(passed)
    return {name: statistics.median(passed) for name, passed in taken.items()}


def show(title: str, found: dict[str, float], rounds: int) -> None:
    """A table with the ratio to its first row."""
    unit = next(iter(found))
    print(f"{f'median of {rounds} alternating runs':<44} {'seconds':>8} {f'x {title}':>18}")
    for name, median in found.items():
        print(f"{name:<44} {median:>8.2f} {median / found[unit]:>18.2f}")


def show_trainings(found: dict[str, float], rounds: int) -> None:
    """How long until an answer, and what each further job and worker adds; the aims beside it."""
    show("a bare script", found, rounds)
    one, more = "-m seed=1{} tracking=none", "-m seed=1,2,3,4,5{} tracking=none"
    jobs = {how: (found[more.format(how)] - found[one.format(how)]) / 4 for how in ("", " launch.nproc=2")}
    tracked = (found["-m seed=1,2,3,4,5"] - found["-m seed=1"]) / 4
    at = {n: found[f"launch.nproc={n} tracking=none"] for n in MANY}
    bare = found["a bare script"]
    print(f"without tracking: {found['epochs=1 tracking=none'] / bare:.2f} of the bare script (aim 1.4)")
    print(f"with MLflow:      {found['epochs=1'] / bare:.2f} of the bare script (aim 1.8)")
    print(
        f"a further job of a sweep: {jobs['']:.2f} s in this process (aim 1.5), {jobs[' launch.nproc=2']:.2f} "
        f"s with two workers (aim 3), {tracked:.2f} s with MLflow"
    )
    for few, many in itertools.pairwise(MANY):
        print(f"each worker from {few} to {many}: {(at[many] - at[few]) / (many - few):.2f} s (aim 0.4)")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=("looking", "training"), help="one of the two tables")
    asked = parser.parse_args()
    if asked.only != "training":
        show("import hydra", medians(COMMANDS, asked.rounds), asked.rounds)
    if asked.only != "looking":
        show_trainings(medians(TRAININGS, asked.rounds), asked.rounds)


if __name__ == "__main__":
    main()
