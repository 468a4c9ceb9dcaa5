"""Keeps torch's answer about the GPUs in the user's cache, so that a plan does not wait for it again.

It holds for one start of the machine, one driver with its cards and MIG devices, one torch, and the variables that CUDA
reads. Only an answer with GPUs is kept: what is broken may have been repaired since.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from trainer.errors import UserError
from trainer.host import cache, files, json_text
from trainer.host.nvml import Driver
from trainer.host.torch_gpus import Answer, as_text, of_text

NAME = "gpus.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES")


def remembered_answer(driver: Driver) -> Answer | None:
    """Torch's answer since the machine was started, if everything is as it was then; else None."""
    try:
        path = cache.cache_root() / NAME
        cache.check_data(path)
        kept = json_text.read_object(path)
        return of_text(json.dumps(kept.get("answer"))) if kept.get("of") == _of(driver) else None
    except (OSError, ValueError, UserError, importlib.metadata.PackageNotFoundError):
        return None


def remember_answer(answer: Answer, driver: Driver) -> None:
    """Keep torch's answer, if the cache can be written."""
    with suppress(OSError, UserError, importlib.metadata.PackageNotFoundError):
        of = _of(driver)
        cache.make(cache.cache_root())
        files.replace_file(
            cache.cache_root() / NAME, json.dumps({"of": of, "answer": json.loads(as_text(answer))}), private=True
        )


def _of(driver: Driver) -> str:
    """A fingerprint of all that an answer depends on."""
    facts = [
        BOOT.read_text(),
        asdict(driver),
        importlib.metadata.version("torch"),
        sys.prefix,
        {name: os.environ.get(name) for name in VARIABLES},
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
