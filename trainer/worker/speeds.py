"""Measures before a run on GPUs how fast its training data are read, and counts what the model computes for each."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.planning.auto import ModelFacts
from trainer.planning.checked_config import Checked
from trainer.worker.probe import meta_model
from trainer.worker.sample_shapes import NotTaken, forward


def with_speeds(model: ModelFacts, checked: Checked) -> ModelFacts:
    """The facts of the model with ``flops`` and ``reads``, for a training on GPUs whose samples take long to read."""
    facts = checked.facts
    if checked.device != "cuda" or checked.elsewhere or not facts.slow or checked.config.mode != "train":
        return model
    return replace(model, flops=_forward_flops(checked.config, facts), reads=checked.source.reading_rate(facts))


def _forward_flops(config: RunConfig, facts: Facts) -> float:
    """The floating-point operations of the forward pass on one training sample; 0: it could not be called."""
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
            warnings.simplefilter("ignore")
            found = forward(meta_model(config), facts, facts.shape, train=True, samples=2)
        return 0.0 if isinstance(found, NotTaken) else counter.get_total_flops() / 2
    finally:
        torch.random.set_rng_state(state)
