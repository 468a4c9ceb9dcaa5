"""Joins what the driver and torch say about the GPUs of a process into one answer, with the reason where there is none.

Torch's answer counts: a GPU that it cannot use is none. The driver says why, and both say what could be done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import takewhile

from trainer.host.nvml import Driver
from trainer.host.torch_gpus import KERNELS, Answer
from trainer.host.visible_gpus import CARD, MIG, Gpu, Visible
from trainer.wording import counted

TOO_OLD = re.compile(r"too old \(found version (\d+)\)")
"""Torch's words, with the newest CUDA of the driver: 12020 is 12.2."""
NUMBERED = re.compile(r".*Error (\d+): ([^(\n]+)")
"""Torch's words about an error of CUDA, after a guess at its cause that is for programmers."""


@dataclass(frozen=True)
class Found:
    """The GPUs that this process can use, in CUDA's order.

    Attributes:
        why: without one, ``no GPU: REASON`` or ``no usable GPU: REASON``; else empty.
        remedy: what would help, besides ``device=cpu``; usually empty.
        concern: a warning about the GPUs that there are; usually empty.
    """

    gpus: tuple[Gpu, ...]
    why: str = ""
    remedy: str = ""
    concern: str = ""

    @property
    def matters(self) -> tuple[list[tuple[int, int]], str, str]:
        """What a plan depends on. Names and memory do not count: torch rounds what the driver says."""
        return [gpu.capability for gpu in self.gpus], self.why, self.concern


def joined(driver: Driver, shown: Visible, answer: Answer | None) -> Found:
    """Join both answers.

    Args:
        shown: what CUDA's rules make of the driver's cards. answer: torch's; None: it was not asked.
    """
    if answer is None or not answer.version:
        said = [answer.error if answer is not None else "", driver.concern, shown.unsure]
        if shown.gpus:
            return Found(shown.gpus, concern="; ".join(filter(None, said)))
        return Found((), f"no GPU: {driver.why or shown.why}")
    if not answer.gpus:
        return _none(driver, shown, answer)
    usable = [_known_by(gpu, shown) for gpu in takewhile(answer.has_kernels, answer.gpus)]
    if len(usable) < len(answer.gpus):
        gpu = answer.gpus[len(usable)]
        lacks = f"{gpu.name} has compute capability {_dotted(gpu.capability)}, and {_torch(answer)} has kernels for "
        lacks += ", ".join(dict.fromkeys(_capability(kernels) for kernels in answer.kernels))
        if not usable:
            return Found((), f"no usable GPU: {lacks}", f"a torch that has kernels for {_dotted(gpu.capability)}")
        after = f"cuda:{len(usable)}" + (" and those after it are" if len(answer.gpus) > len(usable) + 1 else " is")
        return Found(tuple(usable), concern=f"{after} not used: {lacks}")
    concern = driver.concern
    if shown.gpus and len(shown.gpus) != len(usable):
        concern = (
            f"torch shows {counted(len(usable), 'GPU')}, and the driver {len(shown.gpus)} "
            f"({_torch(answer)}, {_driver(driver)}); torch's count is used"
        )
    return Found(tuple(usable), concern=concern)


def _none(driver: Driver, shown: Visible, answer: Answer) -> Found:
    """Why torch has no GPU, and what would help."""
    if not answer.cuda:
        return Found((), f"no usable GPU: torch {answer.version} is built without CUDA", "a torch with CUDA")
    if (old := TOO_OLD.search(answer.error)) is not None:
        cuda = (int(old[1]) // 1000, int(old[1]) % 1000 // 10)
        which = f"driver {driver.version}" if driver.version else "the driver"
        why = (
            f"torch {answer.version} needs a driver for CUDA {answer.cuda.partition('.')[0]}, and {which} is for CUDA "
        )
        remedy = f"update the NVIDIA driver, or install a torch for CUDA {cuda[0]}"
        return Found((), f"no usable GPU: {why}{_dotted(cuda)}", remedy)
    if not shown.gpus:
        return Found((), f"no GPU: {driver.why or shown.why}")
    numbered = NUMBERED.match(answer.error)
    said = f"CUDA error {numbered[1]}, {numbered[2].strip()}" if numbered else answer.error.partition(". ")[0]
    why = f"the driver shows {counted(len(shown.gpus), 'GPU')}, and torch none: {said} ({_torch(answer)}, "
    return Found((), f"no usable GPU: {why}{_driver(driver)})", "nvidia-smi shows the state of the driver")


def _known_by(gpu: Gpu, shown: Visible) -> Gpu:
    """Torch's GPU with the UUID by which the driver knows it: torch leaves out whether it is a card or a MIG device."""
    number = gpu.uuid.removeprefix(CARD)
    same = [one for one in shown.gpus if one.uuid in (f"{CARD}{number}", f"{MIG}{number}")]
    if len(shown.gpus) == 1 and shown.gpus[0].uuid.startswith(MIG):
        same = list(shown.gpus)
    return replace(gpu, uuid=same[0].uuid) if same else gpu


def _torch(answer: Answer) -> str:
    return f"torch {answer.version} (CUDA {answer.cuda})"


def _driver(driver: Driver) -> str:
    version = f"driver {driver.version}" if driver.version else "the driver"
    return f"{version} (CUDA {_dotted(driver.cuda)})" if driver.cuda else version


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _capability(kernels: str) -> str:
    found = KERNELS.fullmatch(kernels)
    return f"{found[2]}.{found[3]}{found[4]}" if found else kernels
