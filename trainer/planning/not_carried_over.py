"""What a resuming run cannot take over from its checkpoint, told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.checkpoint import store
from trainer.planning.async_resume import lost
from trainer.planning.plan import Plan
from trainer.wording import counted

FP16, FP64 = "fp16", "fp64"


def precision(plan: Plan, about: store.About) -> str:
    """How the precision differs from the checkpoint's, or '' if it does not; of ``auto``, what it stands for counts."""
    before, now = about.precision, plan.chosen.precision
    return f"precision was {before}, is {now}" if before != now else ""


def left_behind(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything that a resuming run loses or begins anew.

    Parameters and what the optimizer remembers are float32 with fp32, bf16 and fp16 alike, and float64 with fp64.
    """
    before, now = about.precision, plan.chosen.precision
    if now == FP16 != before:
        yield "precision=fp16 needs a loss scale, and the checkpoint has none: it begins anew, at 65536"
    if before == FP16 != now:
        yield f"the loss scale of precision=fp16, which precision={now} does not need"
    if before == FP64 != now:
        yield "what float64 has more than float32: parameters and what the optimizer remembers are rounded"
    for _ in other_replicas(plan, about):
        mean = "the mean of their parameters and of what their optimizers remember"
        yield f"what tells the replicas of {counted(about.workers, 'worker')} apart: all begin with {mean}"
    for _ in other_errors(plan, about):
        yield "what workers have left out of their gradients: it is not added to a later update"
    yield from lost(plan, about)


def other_replicas(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if workers with own replicas are now more or fewer."""
    if plan.traits.replicas and about.workers != plan.workers:
        yield f"the run had {counted(about.workers, 'worker')}, each with a replica of its own, and has {plan.workers}"


def other_errors(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if workers with compression errors are now more or fewer."""
    told = about.config.get("strategy", {})
    for option, value in (("comm_hook", "powersgd"), ("wire", "int8")):
        if told.get(option) == value and about.workers != plan.workers:
            yield f"the run had {counted(about.workers, 'worker')}, each with what strategy.{option}={value} has left out, and has {plan.workers}"  # fmt: skip


def at_servers(plan: Plan, about: store.About) -> str:
    """Return why parameter servers cannot take over the checkpoint's values (float32 or float64), or ''."""
    kinds = [64 if which == FP64 else 32 for which in (about.precision, plan.chosen.precision)]
    return (
        "" if kinds[0] == kinds[1] else f"is of precision={about.precision}, and servers keep float{kinds[0]} as it is"
    )
