"""The process that asks torch for its GPUs: it prints the answer as a line of JSON. Nothing else here imports torch."""

from __future__ import annotations

import warnings

import torch

from trainer.errors import first_line
from trainer.host.torch_gpus import Answer, as_text
from trainer.host.visible_gpus import CARD, Gpu


def answer_here() -> Answer:
    """Ask torch in this process. It opens CUDA, but makes no context on any GPU."""
    version, cuda = str(torch.__version__), torch.version.cuda or ""
    kernels = tuple(torch.cuda.get_arch_list())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            shown = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return Answer(version, cuda, kernels=kernels, error=first_line(error))
    gpus = [Gpu(one.name, (one.major, one.minor), one.total_memory, f"{CARD}{one.uuid}") for one in shown]
    return Answer(version, cuda, tuple(gpus), kernels)


if __name__ == "__main__":
    print(as_text(answer_here()))
