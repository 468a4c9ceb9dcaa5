"""Chooses how training data reach the device: reading processes, where JPEGs are decoded, what stays on the device.

The plan compares two estimates of images/s. What a reading process gives is measured on some training images of the
data. What a GPU takes is scaled from ResNet-50 at 224 pixels by the operations of the model's forward pass. ``auto``
depends on stated figures alone, so that the same command makes the same plan on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.config import keys
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.wording import counted, sized

if TYPE_CHECKING:
    from trainer.host.visible_gpus import Gpu

CORES_FED = 8
"""Cores that train on a CPU, which one reading process feeds."""
READS = 250
"""JPEGs of 500 x 400 pixels that one core decodes and cuts to 224 in a second, if nothing was measured."""
RESNET50 = 8.2e9
"""Floating-point operations of ResNet-50's forward pass on one image of 224 pixels."""
TAKES = {(7, 0): 1200, (8, 0): 2470, (9, 0): 4700}
"""Images/s of ResNet-50 that GPUs of a compute capability train in 16 bits: V100 and A100 by NVIDIA's
DeepLearningExamples, H200 measured with batches that stay on it."""
WORTH_DECODING = 0.5
"""Share of what the GPU takes below which the GPU decodes: decoding takes a part of its time, too."""
MOST_KEPT = 0.8
"""Share of a GPU's memory that samples may take; the model and its activations need the rest."""
ENOUGH = 0.9
"""Share of what the GPU takes from which reading is fast enough."""


def choose_readers(device: str, cores: int | None, workers_here: int, slow_data: bool) -> tuple[int | str, str]:
    """The number of reading processes of a worker for data.num_workers=auto, and why."""
    if not slow_data:
        return 0, "batches are cut from memory"
    if cores is None:
        return "auto", "from the cores of each host"
    if device == "cuda":
        share = f"({counted(cores, 'core')} - 1) / {counted(workers_here, 'GPU')}"
        return max(1, (cores - 1) // workers_here), share
    per_worker = cores // workers_here
    share = f"{counted(per_worker, 'core')} per worker" if per_worker else "fewer cores than workers"
    return max(1, per_worker // CORES_FED), f"{share}, and one process decodes for {CORES_FED} that train"


def taken_by(gpus: Sequence[Gpu], precision: str, flops: float) -> float:
    """Images/s that the weakest of these GPUs trains, an estimate; 0: not known.

    Args:
        flops: floating-point operations of the forward pass on one image; 0: not known.
    """
    if not gpus or not flops or precision not in ("bf16", "fp16"):
        return 0.0
    return min(_resnet50s(gpu.capability) for gpu in gpus) * RESNET50 / flops


def _resnet50s(capability: tuple[int, int]) -> int:
    """ResNet-50's images/s on a GPU; 0: not known. A newer one than all of ``TAKES`` takes at least the most."""
    return TAKES[max(TAKES)] if capability > max(TAKES) else TAKES.get(capability, 0)


def choose_decoder(
    config: RunConfig, device: str, undecodable: str, readers: int | str, takes: float, elsewhere: bool = False
) -> tuple[str, str]:
    """Where JPEGs are decoded, ``cpu`` or ``gpu``, and why ``auto`` says so; '' for data without ``data.decode``.

    Args:
        undecodable: why a GPU cannot decode these samples; empty: it can. takes: images/s that the GPU trains; 0: not
        known. elsewhere: the run is for other machines, of which it is not known whether they have NVJPEG.

    Raises:
        UserError: data.decode=gpu is not possible.
    """
    asked = config.node("data").get("decode", "")
    if asked in ("", "cpu") or config.mode != "train":  # the config of a run is that of its evaluation, too
        return asked and "cpu", ""
    why = undecodable
    if device != "cuda":
        why = "no GPU trains (device=cpu)" if asked == "gpu" else "no GPU"
    elif config.data.read == "scatter":
        why = "with data.read=scatter the first worker decodes for all"
    if not (why or elsewhere):
        from trainer.host import nvjpeg

        why = nvjpeg.missing()
    if asked == "gpu" and why:
        raise UserError("data.decode=gpu", why, "data.decode=cpu")
    if asked == "gpu":
        return "gpu", ""
    if why:
        return "cpu", why
    if not takes or isinstance(readers, str):
        return "cpu", "how many images/s the GPU takes is not known"
    gives = readers * READS
    decode = f"{counted(readers, 'reading process')} decode{'s' if readers == 1 else ''}"
    said = f"{decode} about {rounded(gives)} of the {rounded(takes)} images/s"
    return ("gpu" if gives < WORTH_DECODING * takes else "cpu"), f"{said} that the GPU takes"


def shortage(facts: Facts, decode: str, readers: int | str, reads: float, takes: float) -> str:
    """A warning if reading processes give clearly less than the GPU takes; usually empty.

    Args:
        reads: images/s of one of them, measured; 0: not measured.
    """
    if isinstance(readers, str) or decode == "gpu" or not readers * reads * takes or readers * reads >= ENOUGH * takes:
        return ""
    ways = ["fewer augmentations", "more cores per GPU"]
    if not facts.cached:
        ways = [*(["data.decode=gpu"] if not facts.undecodable else []), "data.cache=ram", "data.cache=device", *ways]
    else:
        ways = ["data.cache=device", *ways]
    gives = f"{counted(readers, 'reading process')} give{'s' if readers == 1 else ''}"
    gives = f"{gives} about {rounded(readers * reads)} images/s"
    return f"{gives}, and the GPU takes about {rounded(takes)}: try {', '.join(ways[:-1])} or {ways[-1]}"


def rate_said(readers: int | str, reads: float, takes: float) -> str:
    """What reading processes give against what the GPU takes, as the end of a reason; empty: not measured."""
    if isinstance(readers, str) or not readers or not reads:
        return ""
    against = f" of the {rounded(takes)} that the GPU takes" if takes else ""
    return f"; they give about {rounded(readers * reads)} images/s{against}"


def rounded(rate: float) -> str:
    """A rate with two digits, e.g. 4,700."""
    return f"{float(f'{rate:.2g}'):,.0f}"


def check_resident(config: RunConfig, facts: Facts, device: str, gpus: Sequence[Gpu]) -> None:
    """Refuse data.cache=device for samples that are changed on the CPU, or that do not fit a GPU.

    Raises:
        UserError: what hinders it.
    """
    node = config.node("data")
    if node.get("cache") != "device" or config.mode == "predict":
        return
    key, ram = "data.cache=device", "data.cache=ram"
    if (augment := node.get("augment", "none")) != "none":
        raise UserError(key, f"data.augment={augment} changes images one by one on the CPU", ram)
    if node.get("transforms"):
        raise UserError(key, "data.transforms change images one by one on the CPU", ram)
    if config.data.read == "scatter":
        raise UserError(key, "with data.read=scatter the first worker reads for all", "data.read=each")
    readers = config.data.num_workers
    if readers not in (None, "auto", 0):
        why = "no process reads with data.cache=device"
        raise UserError(f"data.num_workers={keys.spelled(readers)}", why, "data.num_workers=auto")
    memory = min((gpu.memory for gpu in gpus if gpu.memory), default=0) if device == "cuda" else 0
    if memory and facts.resident > MOST_KEPT * memory:
        size = f"the samples take {sized(facts.resident)} of each GPU"
        raise UserError(key, f"{size}, which has {sized(memory)} and keeps a fifth for the model", ram)
