"""Checks whether the updates of a run can be captured as one CUDA graph (``execution.cuda_graph=true``).

A graph replays the same kernels on the same memory, and no line of Python runs. So each update has the same shapes,
nothing in it needs the host, and the last batch of an epoch is padded with samples that do not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import schema
from trainer.config.keys import spelled
from trainer.data.sampler import TrainingSampler, training_sampler
from trainer.errors import UserError
from trainer.planning.auto import ModelFacts
from trainer.planning.checked_config import Checked
from trainer.planning.chosen import Chosen

KEY = "execution.cuda_graph=true"
OFF = "execution.cuda_graph=false"
STRATEGIES = (schema.StrategyConfig._target_, schema.CollectiveStrategy._target_)


def check_capture(checked: Checked, model: ModelFacts, chosen: Chosen) -> None:
    """Refuse to capture updates that cannot be.

    Raises:
        UserError: with the reason, and what to type instead.
    """
    if checked.config.mode != "train":
        return
    for why, instead in (*_of_machine(checked, chosen), *_of_config(checked), *_of_model(checked, model, chosen)):
        raise UserError(KEY, why, instead)


def _of_machine(checked: Checked, chosen: Chosen) -> Iterator[tuple[str, str]]:
    if checked.device != "cuda":
        yield "captures kernels of a GPU, and this run trains on CPUs", OFF
    if chosen.precision == "fp16":
        yield "in fp16 the host would have to ask in each update whether its gradients are finite", "precision=bf16"
    if not chosen.fused_optimizer:
        yield "needs an optimizer that is one kernel, with its learning rate on the GPU (SGD, Adam, AdamW)", OFF
    if chosen.compiling.compile and chosen.compiling.mode in ("reduce-overhead", "max-autotune"):
        why = f"execution.compile_mode={chosen.compiling.mode} records graphs of its own"
        yield why, "execution.compile_mode=default"


def _of_config(checked: Checked) -> Iterator[tuple[str, str]]:
    config, strategy = checked.config, checked.config.strategy
    if strategy._target_ not in STRATEGIES:
        yield f"strategy={checked.declaration.name} has steps on the host in an update", "strategy=collective"
    if checked.merge > 1:
        why = f"an update has {checked.merge} batches, and a graph holds one"
        yield why, "strategy.gradient_merge.k_steps=1"
    if isinstance(strategy, schema.CollectiveStrategy):
        if strategy.find_unused_parameters:
            why = "strategy.find_unused_parameters=true asks in each update which parameters were used"
            yield why, "strategy.find_unused_parameters=false"
        if strategy.comm_hook != "none":
            yield f"strategy.comm_hook={strategy.comm_hook} runs on the host in each update", "strategy.comm_hook=none"
        if strategy.reduce_group or strategy.comm_streams > 1:
            why = "gradients go over other groups than DDP's own (strategy.reduce_group, strategy.comm_streams)"
            yield why, "strategy.reduce_group=null strategy.comm_streams=1"
    if config.on_nonfinite != "stop":
        yield f"on_nonfinite={config.on_nonfinite} reads the gradients in each update", "on_nonfinite=stop"


def _of_model(checked: Checked, model: ModelFacts, chosen: Chosen) -> Iterator[tuple[str, str]]:
    facts, config = checked.facts, checked.config
    if isinstance(facts.shape, dict) or model.in_tables:
        yield "is for models of one tensor without tables: rows of tables differ in number", OFF
    if facts.iterable or facts.streams or checked.leased:
        yield "the data are a stream, whose batches may have any number of samples", OFF
    if model.denominator != "samples":
        yield f"the loss is divided by {model.denominator}, which the host adds up for each batch", OFF
    sampler = training_sampler(config, facts.train_samples, config.batch_size, 0, checked.workers)
    if not sampler.even(1, config.limit_train_batches):
        yield (
            "workers have unequally many samples in an update, and each would need a factor of its own",
            _even(checked),
        )
    if pads(sampler, config.batch_size, config.limit_train_batches):
        kinds = [kind for kind in model.norms if kind.startswith(("BatchNorm", "SyncBatchNorm"))]
        if kinds:
            yield (
                f"the epoch's last batch is not full, and {kinds[0]} would count its padding",
                "sampler.drop_last=true",
            )
        if not model.loss_by_sample:
            why = "the epoch's last batch is not full, and the loss tells no loss of each sample (reduction='none')"
            yield why, "sampler.drop_last=true"


def _even(checked: Checked) -> str:
    if together := checked.config.data.global_batch_size:
        return f"data.global_batch_size={max(1, together // checked.workers) * checked.workers}"
    return "sampler.pad=true" if not checked.config.sampler.pad else f"sampler.drop_last={spelled(True)}"


def pads(sampler: TrainingSampler, size: int, limit: int | None) -> bool:
    """Whether a batch of an epoch has fewer samples than others."""
    return any(samples < size for samples in sampler.sizes()[:limit])
