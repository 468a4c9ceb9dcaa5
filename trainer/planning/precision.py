"""Decides what ``precision=auto`` stands for: one table of rules, or a measurement on the GPU.

On a GPU three things decide. Its compute capability says which 16-bit units it has. A small model is all launches of
kernels, and 16 bits add conversions to them: LeNet runs at half the speed in bf16. For batch norm torch takes cuDNN's
kernels in fp16 and fp32, and its own in bf16 (``torch._C._select_batch_norm_backend``): on one H200 a ResNet-50 trains
at 5,985 images/s in fp16 and at 4,703 in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FP32, BF16, FP16 = "fp32", "bf16", "fp16"
BIG_MODEL = 1_000_000
"""Parameters, without those of tables, from which 16 bits pay."""
FASTER = 1.05
"""How much faster a precision with fewer bits, or with a loss scale, has to be measured to be chosen."""
UNKNOWN, VOLTA, AMPERE = (0, 0), (7, 0), (8, 0)
"""Compute capabilities: the driver does not say; the first with fp16 matrix units; the first with bf16 ones."""


@dataclass(frozen=True)
class Case:
    """What the precision depends on.

    Attributes:
        device: ``cpu`` or ``cuda``. capability: of the weakest GPU of the workers; None: the GPUs are not known here.
        bf16_units: instruction sets of the CPU that compute bf16. parameters: without those of tables.
        batch_norm: the model has batch norms that torch computes by cuDNN in some precisions.
        without_fp16: why fp16 is not possible; empty: it is. waits_in_fp16: why it would make each update wait.
        speeds: samples per second by precision, as measured; empty: not measured.
        before: the precision of the checkpoint from which the run resumes, and its name; empty: the run begins.
    """

    device: str
    capability: tuple[int, int] | None
    bf16_units: Sequence[str]
    parameters: int
    convolutional: bool
    batch_norm: bool
    without_fp16: str = ""
    waits_in_fp16: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)
    before: tuple[str, str] = ("", "")

    @property
    def gpu(self) -> tuple[int, int]:
        """The compute capability; that of an A100 where the GPUs are not known."""
        return AMPERE if self.capability is None else self.capability

    @property
    def on_gpu(self) -> str:
        """The GPU's compute capability in words."""
        if self.capability is None:
            return "assuming GPUs of compute capability 8.0 or newer"
        return f"compute capability {self.gpu[0]}.{self.gpu[1]}"

    @property
    def prefers_fp16(self) -> bool:
        """Whether fp16 is faster than bf16, and costs no wait."""
        return self.batch_norm and not self.without_fp16 and not self.waits_in_fp16


class Rule(NamedTuple):
    """A precision, the case for which it is chosen, and the reason."""

    precision: str
    applies: Callable[[Case], bool]
    why: Callable[[Case], str]


def _small(case: Case) -> str:
    return f"with {case.parameters:,} parameters, below {BIG_MODEL:,},"


ON_GPUS = (
    Rule(FP32, lambda c: c.gpu == UNKNOWN, lambda c: "the driver does not say which compute capability the GPU has"),
    Rule(FP32, lambda c: c.gpu < VOLTA, lambda c: "no 16-bit matrix units"),
    Rule(
        FP32,
        lambda c: c.parameters < BIG_MODEL,
        lambda c: f"{_small(c)} kernels are so short that 16 bits only add conversions",
    ),
    Rule(
        FP32,
        lambda c: c.gpu < AMPERE and bool(c.without_fp16),
        lambda c: f"{c.on_gpu} has no bf16, and fp16 is not possible ({c.without_fp16})",
    ),
    Rule(FP16, lambda c: c.gpu < AMPERE, lambda c: f"{c.on_gpu} has fp16 matrix units and no bf16"),
    Rule(
        FP16,
        lambda c: c.prefers_fp16,
        lambda c: f"{c.on_gpu}, and torch computes batch norm by cuDNN in fp16, which it does not in bf16",
    ),
    Rule(
        BF16,
        lambda c: c.batch_norm,
        lambda c: f"{c.on_gpu} computes bf16 natively; not fp16: {c.without_fp16 or c.waits_in_fp16}",
    ),
    Rule(BF16, lambda c: c.capability is None, lambda c: c.on_gpu),
    Rule(BF16, lambda c: True, lambda c: f"{c.on_gpu} computes bf16 natively"),
)
ON_CPUS = (
    Rule(FP32, lambda c: not c.bf16_units, lambda c: "this CPU has no bf16 instructions (AMX or AVX512-BF16)"),
    Rule(FP32, lambda c: not c.convolutional, lambda c: "on a CPU bf16 pays for convolutions, and this model has none"),
    Rule(FP32, lambda c: c.parameters < BIG_MODEL, lambda c: f"{_small(c)} bf16 does not pay on a CPU"),
    Rule(BF16, lambda c: True, lambda c: f"this CPU has {', '.join(c.bf16_units)}: 2-3x for convolutions"),
)
"""The first rule that applies decides. Each table ends with one that always does."""


def choose_precision(case: Case) -> tuple[str, str]:
    """Choose the precision; returns it, and why."""
    if case.before[0] in (possible := candidates(case)):
        return case.before[0], f"as in {case.before[1]}"
    measured = [name for name in possible if name in case.speeds]
    if len(measured) > 1:
        shown = ", ".join(f"{name} {case.speeds[name]:,.0f}" for name in reversed(measured))
        return _fastest(case.speeds, measured), f"measured here: {shown} samples/s"
    rules = ON_GPUS if case.device == "cuda" else ON_CPUS
    rule = next(rule for rule in rules if rule.applies(case))
    return rule.precision, rule.why(case)


def candidates(case: Case) -> list[str]:
    """The precisions that a measurement compares, the most precise first; on a CPU there are none.

    fp16 is one only where bf16 is not the safer choice at the same speed.
    """
    if case.device != "cuda" or case.gpu < VOLTA:
        return []
    fp16 = case.prefers_fp16 or (case.gpu < AMPERE and not case.without_fp16)
    return [FP32, *([BF16] if case.gpu >= AMPERE else []), *([FP16] if fp16 else [])]


def _fastest(speeds: Mapping[str, float], measured: Sequence[str]) -> str:
    best = measured[0]
    for name in measured[1:]:
        best = name if speeds[name] > FASTER * speeds[best] else best
    return best
