"""How long the commands take that only look at the config, against ``import hydra``: ``python benchmarks/startup.py``.

The commands run in turn, round after round, so that a busy machine slows all of them alike; medians are compared.
"""

from __future__ import annotations

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


def main() -> None:
    """Measure and print the table."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            for name, command in COMMANDS.items():
                passed = seconds(command, folder)
                if number:  # the first round fills the caches
                    taken[name].append(passed)
    medians = {name: statistics.median(passed) for name, passed in taken.items()}
    unit = next(iter(medians.values()))
    print(f"median of {ROUNDS} alternating runs          seconds   x import hydra")
    for name, median in medians.items():
        print(f"{name:<38} {median:>8.2f} {median / unit:>16.1f}")


if __name__ == "__main__":
    main()
