"""A driver's library (libnvidia-ml.so.1) of a machine that a test describes, called by the real pynvml through ctypes.

Handles are numbers: 100 x (card + 1), and of a card's MIG device that plus its position + 1.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from trainer.host import hardware, nvml, usable_gpus
from trainer.host.torch_gpus import Answer
from trainer.host.visible_gpus import Gpu

MIB = 1 << 20
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED, GPU_IS_LOST, MISMATCH = 3, 4, 6, 9, 15, 18


@dataclass(frozen=True)
class Card:
    """A card, or a MIG device of one.

    Attributes:
        memory, used: MiB; None: the card does not say. busy: percent. slices: its MIG devices; None: no MIG mode.
        error: what the driver answers instead of it. bus: number of its PCI bus; None: it does not say.
    """

    name: str
    uuid: str
    capability: tuple[int, int] = (9, 0)
    memory: int | None = 81559
    used: int | None = 1024
    busy: int | None = 37
    cores: int = 16896
    slices: tuple[Card, ...] | None = None
    error: int = 0
    bus: int | None = None


class Library:
    """The functions that the product calls. ``lacks``: those that this driver is too old for."""

    def __init__(
        self,
        cards: Sequence[Card] = (),
        version: str = "580.95.05",
        cuda: int = 13000,
        error: int = 0,
        lacks: Sequence[str] = (),
    ) -> None:
        self.cards, self.version, self.cuda, self.error, self.lacks = cards, version, cuda, error, lacks
        self.opened = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "lacks"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def _of(self, handle: Any) -> Card:
        number = ctypes.cast(handle, ctypes.c_void_p).value
        assert number
        card = self.cards[number // 100 - 1]
        return (card.slices or ())[number % 100 - 1] if number % 100 else card

    @staticmethod
    def _handle(number: int, out: Any) -> int:
        ctypes.c_void_p.from_buffer(out._obj).value = number
        return 0

    @staticmethod
    def _number(value: int | None, out: Any) -> int:
        if value is None:
            return NOT_SUPPORTED
        out._obj.value = value
        return 0

    @staticmethod
    def _text(text: str, buffer: Any) -> int:
        buffer.value = text.encode()
        return 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.opened += not self.error
        return self.error

    def nvmlShutdown(self) -> int:
        self.opened -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        return self._text(self.version, buffer)

    def nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        return self._number(self.cuda, out)

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        return self._number(len(self.cards), out)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        return self.cards[index.value].error or self._handle(100 * (index.value + 1), out)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, out: Any) -> int:
        for i, card in enumerate(self.cards):
            for j, one in enumerate([card, *(card.slices or ())]):
                if one.uuid.encode() == uuid.value:
                    return self._handle(100 * (i + 1) + j, out)
        return NOT_FOUND

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._text(self._of(handle).name, buffer)

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._text(self._of(handle).uuid, buffer)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        capability = self._of(handle).capability
        return self._number(capability[0], major) + self._number(capability[1], minor)

    def nvmlDeviceGetNumGpuCores(self, handle: Any, out: Any) -> int:
        return self._number(self._of(handle).cores, out)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, out: Any) -> int:
        return self._number(1980, out)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        card = self._of(handle)
        if card.memory is None or card.used is None:
            return NOT_SUPPORTED
        out._obj.total, out._obj.used = card.memory * MIB, (card.used + 600) * MIB  # with what the driver keeps
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, out: Any) -> int:
        failed = self.nvmlDeviceGetMemoryInfo(handle, out)
        out._obj.used -= 0 if failed else 600 * MIB
        return failed

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:
        busy = self._of(handle).busy
        if busy is None:
            return NOT_SUPPORTED
        out._obj.gpu = busy
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        if (bus := self._of(handle).bus) is None:
            return NOT_SUPPORTED
        out._obj.busId = f"00000000:{bus:02X}:00.0".encode()
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, out: Any) -> int:
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        return self._handle(number - number % 100, out) if number % 100 else NOT_FOUND

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return self._number(int(self._of(handle).slices is not None), current) + self._number(0, pending)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        return self._number(0 if self._of(handle).slices is None else 8, out)  # with a gap at number 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        if not 1 <= index.value <= len(self._of(handle).slices or ()):
            return NOT_FOUND
        return self._handle((ctypes.cast(handle, ctypes.c_void_p).value or 0) + index.value, out)

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, out: Any) -> int:
        return self._number((ctypes.cast(handle, ctypes.c_void_p).value or 0) % 100 + 6, out)

    def nvmlDeviceGetComputeInstanceId(self, handle: Any, out: Any) -> int:
        return self._number(0, out)


def install(monkeypatch: pytest.MonkeyPatch, library: Library | None, devices: bool = False, **variables: str) -> None:
    """Let this process find this library, and nothing else of a driver.

    Args:
        library: None: there is none. devices: there are CUDA's library and /dev/nvidia0. variables: of the environment.
    """
    import pynvml

    def loaded(name: str) -> Any:
        if name == "libnvidia-ml.so.1" and library is not None:
            return library
        if name == "libcuda.so.1" and devices:
            return object()
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    for module in (nvml, hardware, pynvml):
        monkeypatch.setattr(module, "CDLL", loaded)
    monkeypatch.setattr(hardware, "_device_files", lambda: devices)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a new process does: nothing is known of any GPU."""
    monkeypatch.setattr(usable_gpus, "_ANSWERS", [])
    for module, name in (
        (hardware, "has_driver"),
        (hardware, "has_cuda"),
        (usable_gpus, "_driver"),
        (usable_gpus, "_shown"),
        (usable_gpus, "_remembered"),
    ):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))


class Asked:
    """Stands for the process that asks torch: it has this answer at once. ``times``: how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
        self.said, self.times, self.ended = answer, 0, 0
        monkeypatch.setattr(usable_gpus, "Question", self.begin)

    def begin(self) -> Asked:
        self.times += 1
        return self

    def answer(self) -> Answer:
        return self.said

    def end(self) -> None:
        self.ended += 1


KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OLD_KERNELS = ("sm_50", "sm_60", "sm_70", *KERNELS[:-2], "compute_90")


def torch_shows(*cards: Card, kernels: Sequence[str] = KERNELS, version: str = "2.15.0+cu132", **more: Any) -> Answer:
    """Torch's answer: these GPUs, with a little less memory than the driver says."""
    gpus = [
        Gpu(c.name, c.capability, (c.memory or 0) * MIB * 99 // 100, f"GPU-{c.uuid.partition('-')[2]}") for c in cards
    ]
    return Answer(version, f"{version[-3:-1]}.{version[-1]}", tuple(gpus), tuple(kernels), **more)


def torch_fails(error: str) -> Answer:
    """Torch's answer where it has no GPU."""
    return replace(torch_shows(), error=error)
