"""Asks the NVIDIA driver's library (NVML) for the cards of this machine and their load, without CUDA and torch.

The library is libnvidia-ml.so.1, which comes with the driver; ``pynvml`` (nvidia-ml-py) calls it. Containers have it
with the capability ``utility`` alone. Drivers leave out what a card does not know, and old ones lack whole functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

from trainer.host.visible_gpus import Card, Gpu

LIBRARY = "libnvidia-ml.so.1"
ANSWER_S = 60.0
"""Longest wait for the driver: 8 cards that nobody uses take up to 30 s to wake up."""
MIB = 1 << 20
REASONS = {
    "NVML_ERROR_NO_PERMISSION": "this user may not open the driver's devices (/dev/nvidiactl)",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "the loaded NVIDIA driver is of another version than its library (NVML: driver/library version mismatch); "
        "a restart of the machine loads the new one"
    ),
}


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        cards: in the order of their PCI bus.
        version: of the driver, e.g. 580.95.05. cuda: the newest CUDA that it is for, e.g. (13, 0). Empty: not known.
        why: why it cannot be asked; empty: it could.
        concern: cards that do not answer, a sentence; usually empty.
    """

    cards: tuple[Card, ...] = ()
    version: str = ""
    cuda: tuple[int, ...] = ()
    why: str = ""
    concern: str = ""


@dataclass(frozen=True)
class Load:
    """How much of a GPU is in use: percent of the time, MiB of its memory; None: the card does not say ([N/A])."""

    busy: float | None
    used: float | None


class NoDriver(Exception):
    """The error for a driver's library that cannot be used; the message is the reason, as the rest of a sentence."""


def read() -> Driver:
    """Ask the driver for its cards. A card that has failed may keep the driver from answering at all."""
    try:
        _load_library()
    except NoDriver as error:
        return Driver(why=str(error))
    answers: list[Driver | Exception] = []
    asking = threading.Thread(target=_answer, args=(answers,), daemon=True, name="nvml")
    asking.start()
    asking.join(ANSWER_S)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        return answer
    return Driver(why=f"the NVIDIA driver does not answer within {ANSWER_S:g} s")


def _answer(answers: list[Driver | Exception]) -> None:
    try:
        answers.append(_read())
    except Exception as error:
        answers.append(error)


def _read() -> Driver:
    try:
        with _opened() as nvml:
            cuda = _known(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
            cards, silent = [], []
            for number in range(nvml.nvmlDeviceGetCount()):
                try:
                    cards.append(_card(nvml, nvml.nvmlDeviceGetHandleByIndex(number)))
                except nvml.NVMLError_NoPermission:  # another job's, in a control group: CUDA does not count it either
                    continue
                except nvml.NVMLError as error:
                    silent.append(f"card {number} does not answer (NVML: {error})")
            return Driver(
                tuple(cards),
                _known(nvml, nvml.nvmlSystemGetDriverVersion) or "",
                (cuda // 1000, cuda % 1000 // 10) if cuda else (),
                concern="; ".join(silent),
            )
    except NoDriver as error:
        return Driver(why=str(error))


def loads(uuids: Sequence[str]) -> list[Load]:
    """The load of GPUs and MIG devices with these UUIDs, in this order; empty: the driver cannot be asked."""
    try:
        with _opened() as nvml:
            return [_load(nvml, uuid) for uuid in uuids]
    except NoDriver:
        return []


def bus_ids(uuids: Sequence[str]) -> list[str]:
    """The PCI addresses of GPUs and MIG devices with these UUIDs, such as ``00000000:17:00.0``; empty: not known."""
    try:
        with _opened() as nvml:
            return [_bus_id(nvml, uuid) for uuid in uuids]
    except NoDriver:
        return [""] * len(uuids)


@contextmanager
def _opened() -> Iterator[Any]:
    """Context manager: yields pynvml with the library open.

    Raises:
        NoDriver: it cannot be opened, or fails.
    """
    _load_library()
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        reasons = {getattr(pynvml, name): reason for name, reason in REASONS.items()}
        raise NoDriver(reasons.get(error.value, f"NVML says {error} (error {error.value})")) from None


def _load_library() -> None:
    """Load the driver's library.

    Raises:
        NoDriver: it is not there, or cannot be loaded.
    """
    try:
        CDLL(LIBRARY)
    except OSError as error:
        raise NoDriver(f"the driver's library cannot be loaded ({error})") from None


def _known(nvml: Any, ask: Callable[..., Any], *about: Any) -> Any:
    """The driver's answer; None: it has none about this card, or its version lacks the function."""
    try:
        return ask(*about)
    except nvml.NVMLError:
        return None


def _card(nvml: Any, handle: Any) -> Card:
    """Describe one card. Its name and UUID have to be known, all else need not."""
    gpu = Gpu(
        nvml.nvmlDeviceGetName(handle),
        _known(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0),
        _memory(nvml, handle),
        nvml.nvmlDeviceGetUUID(handle),
    )
    cores = _known(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    clock = _known(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) or 0
    mode = _known(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return Card(gpu, speed=cores * clock)
    slices, older = [], []
    for number in range(_known(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        slice = _known(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if slice is None:  # the numbers have gaps
            continue
        name = _known(nvml, nvml.nvmlDeviceGetName, slice) or f"{gpu.name} MIG"
        slices.append(Gpu(name, gpu.capability, _memory(nvml, slice), nvml.nvmlDeviceGetUUID(slice)))
        instances = (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
        ids = [str(_known(nvml, ask, slice)) for ask in instances]
        older.append(f"MIG-{gpu.uuid}/{'/'.join(ids)}")
    return Card(gpu, tuple(slices), tuple(older), cores * clock)


def _memory(nvml: Any, handle: Any) -> int:
    found = _known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return int(found.total) if found is not None else 0


def _load(nvml: Any, uuid: str) -> Load:
    handle = _known(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid) if uuid else None
    if handle is None:
        return Load(None, None)
    busy = _known(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    # The second version counts as nvidia-smi does: without what the driver keeps for itself.
    memory = _known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = memory or _known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Load(
        None if busy is None else float(busy.gpu), None if memory is None else round(float(memory.used) / MIB, 1)
    )


def _bus_id(nvml: Any, uuid: str) -> str:
    handle = _known(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid) if uuid else None
    if handle is None:
        return ""
    card = _known(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
    found = _known(nvml, nvml.nvmlDeviceGetPciInfo, card)
    return "" if found is None else str(found.busId)
