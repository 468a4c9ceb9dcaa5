"""Asks torch, in a process of its own, for the GPUs that it can use.

A driver that shows a GPU may be too old for torch's CUDA, and torch may have no kernels for the card. Only torch knows.
It is asked in another process: the command's own has to stay without CUDA, whose context takes memory on the first GPU
and does not survive a fork.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.host.visible_gpus import Gpu

ANSWER_S = 120.0
"""Longest wait for torch: its import takes 4 s, and 8 cards that nobody uses take up to 30 s to wake up."""
CHILD = "trainer.host.ask_torch"
END_S = 5.0
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True)
class Answer:
    """What torch says.

    Attributes:
        version: of torch; empty: it did not answer. cuda: for which it was built, e.g. 13.2; empty: without CUDA.
        gpus: in CUDA's order. kernels: the architectures for which it has kernels, e.g. ``sm_90``.
        error: why there is no GPU, in torch's words.
    """

    version: str
    cuda: str
    gpus: tuple[Gpu, ...] = ()
    kernels: tuple[str, ...] = ()
    error: str = ""

    def has_kernels(self, gpu: Gpu) -> bool:
        """Whether torch can compute on a GPU: with kernels for its generation, or such as its driver translates."""
        return not self.kernels or any(runs_on(kernels, gpu.capability) for kernels in self.kernels)


def runs_on(kernels: str, capability: tuple[int, int]) -> bool:
    """Whether kernels run on a GPU: ``sm_86`` on 8.6 and 8.9, ``compute_86`` on 8.6 and newer, ``sm_90a`` on 9.0 alone
    (CUDA programming guide, binary and PTX compatibility)."""
    if (found := KERNELS.fullmatch(kernels)) is None:
        return True
    kind, needs, letter = found[1], (int(found[2]), int(found[3])), found[4]
    if letter == "a":
        return capability == needs
    return capability >= needs and (capability[0] == needs[0] or (kind == "compute" and not letter))


def as_text(answer: Answer) -> str:
    """The answer as one line of JSON."""
    return json.dumps(asdict(answer))


def of_text(text: str) -> Answer:
    """Read an answer.

    Raises:
        ValueError: it is none.
    """
    try:
        found: dict[str, Any] = dict(json_text.loads(text))
        gpus = [Gpu(capability=tuple(one.pop("capability")), **one) for one in found.pop("gpus")]
        return Answer(gpus=tuple(gpus), kernels=tuple(found.pop("kernels")), **found)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(str(error)) from error


class Question:
    """A process that asks torch. It runs beside the command, which imports torch meanwhile; nobody else may use it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(  # this interpreter with this package's module; no shell  # nosec B603
            [sys.executable, "-m", CHILD],
            cwd=PACKAGE_PARENT,  # `-m` puts the working directory first on the path, where a stray torch.py could lie
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_path())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> Answer:
        """Wait for the answer. Without one its ``version`` is empty, and ``error`` says why."""
        try:
            said, _ = self.process.communicate(timeout=ANSWER_S)
            return of_text((said.strip().splitlines() or [""])[-1])  # libraries may print lines of their own before
        except subprocess.TimeoutExpired:
            return Answer("", "", error=f"torch did not say within {ANSWER_S:g} s which GPUs it can use")
        except ValueError:
            return Answer("", "", error="torch could not be asked which GPUs it can use")
        finally:
            self.end()

    def end(self) -> None:
        """End the process, if it is still there. One that hangs in the driver ends when that lets it."""
        if self.process.poll() is None:
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _path() -> Sequence[str]:
    return [str(PACKAGE_PARENT), *(os.path.abspath(entry) for entry in sys.path if entry)]
