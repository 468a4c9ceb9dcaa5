"""The independent truth: training written out by hand for one process, and for local SGD's replicas one after
another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import nn

from tests.strategies.tiny import Layered, images
from trainer.models.lenet import LeNet

Parameters = dict[str, torch.Tensor]


Truth = tuple[dict[str, np.ndarray], dict[str, float], list[float]]
KNOWN: dict[str, Truth] = {}
"""By all that it depends on: runs of many strategies and sizes have the same truth."""


def by_hand(config: dict[str, Any], workers: int) -> Truth:
    """Parameters and validation of one process on the global batches, and the gradients' norms before clipping."""
    data = {k: config["data"][k] for k in ("train_samples", "val_samples", "num_classes", "global_batch_size")}
    shared = () if data["global_batch_size"] is not None else (workers, config["data"]["batch_size"])
    strategy = [config["strategy"][k] for k in ("gradient_merge", "clip_norm")]
    others = [
        config[k]
        for k in ("seed", "model", "sampler", "optimizer", "scheduler", "max_steps", "limit_train_batches", "loss")
    ]
    which = json.dumps([data, shared, strategy, others], sort_keys=True, default=str)
    if which not in KNOWN:
        KNOWN[which] = _by_hand(config, workers)
    return KNOWN[which]


def _by_hand(config: dict[str, Any], workers: int) -> Truth:
    model, parameters = start(config)
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    merge, norms = config["strategy"]["gradient_merge"], []
    given = config["loss"]["weight"]
    weight = None if given is None else torch.tensor(given, dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(weight, label_smoothing=config["loss"]["label_smoothing"])
    for step, batches in enumerate(updates(config, workers)):
        chosen = np.concatenate(batches)
        loss = criterion(model(inputs[chosen]), labels[chosen])
        gradients = gradient(model, parameters, loss * (1 if merge["avg"] else len(batches)))
        norms.append(math.sqrt(sum(g.square().sum().item() for g in gradients.values())))
        limit = config["strategy"]["clip_norm"]
        clip = min(1.0, limit / (norms[-1] + 1e-6)) if limit else 1.0  # the 1e-6 is clip_grad_norm_'s
        descend(config, step, parameters, momentum, {name: clip * g for name, g in gradients.items()})
    return {n: p.detach().numpy() for n, p in parameters.items()}, validation(config, model), norms


def replicas(config: dict[str, Any], workers: int) -> list[list[dict[str, np.ndarray]]]:
    """Local SGD, replica by replica: for each worker its parameters after each update, even batches, no clipping."""
    strategy = config["strategy"]
    crew = [start(config) for _ in range(workers)]
    momenta = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _, parameters in crew]
    inputs, labels = (torch.from_numpy(a) for a in images(config["data"]["train_samples"], 1))
    seen: list[list[dict[str, np.ndarray]]] = [[] for _ in crew]
    for step, (batch,) in enumerate(updates(config, workers)):
        for rank, (model, parameters) in enumerate(crew):
            mine = batch[rank::workers]
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
            descend(config, step, parameters, momenta[rank], gradient(model, parameters, loss))
        if step < strategy["begin_step"] or (step + 1) % strategy["k_steps"] == 0:
            with torch.no_grad():
                for name in crew[0][1]:
                    mean = sum(parameters[name] for _, parameters in crew) / workers
                    for _, parameters in crew:
                        parameters[name].copy_(mean)
        for rank, (_, parameters) in enumerate(crew):
            seen[rank].append({n: p.detach().numpy().copy() for n, p in parameters.items()})
    return seen


def start(config: dict[str, Any]) -> tuple[nn.Module, Parameters]:
    """The model drawn from the seed, contiguous and in float64 whatever the run's precision and memory format."""
    torch.manual_seed(config["seed"])
    kind = Layered if config["model"]["_target_"].endswith("Layered") else LeNet
    model = kind(num_classes=config["data"]["num_classes"], image_size=8).double()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model, dict(model.named_parameters())


def updates(config: dict[str, Any], workers: int) -> Iterator[list[np.ndarray]]:
    """For every update of the run its global batches, as indices of samples."""
    samples, sampler, merge = config["data"]["train_samples"], config["sampler"], config["strategy"]["gradient_merge"]
    together = config["data"]["batch_size"] * workers
    if config["data"]["global_batch_size"] is not None:
        yield from whole_updates(config)
        return
    step = epoch = 0
    while True:
        order = np.random.default_rng((config["seed"], epoch)).permutation(samples)
        while sampler["pad"] and len(order) % workers:
            order = np.append(order, order[len(order) - samples])
        batches = [order[i : i + together] for i in range(0, len(order), together)]
        if sampler["drop_last"] and len(batches[-1]) < together:
            batches.pop()
        batches = batches[: config["limit_train_batches"]]
        for first in range(0, len(batches), merge["k_steps"]):
            if step == config["max_steps"]:
                return
            yield batches[first : first + merge["k_steps"]]
            step += 1
        epoch += 1


def whole_updates(config: dict[str, Any]) -> Iterator[list[np.ndarray]]:
    """The same where the global batch is given: consecutive pieces of the epoch's order, of which only the size
    counts."""
    samples, size, k = (
        config["data"]["train_samples"],
        config["data"]["global_batch_size"],
        config["strategy"]["gradient_merge"]["k_steps"],
    )
    step = epoch = 0
    while True:
        order = np.random.default_rng((config["seed"], epoch)).permutation(samples)
        batches: list[np.ndarray] = []
        for first in range(0, samples, size):
            update = order[first : first + size]
            if len(update) == size or not config["sampler"]["drop_last"]:
                batches += np.array_split(update, math.ceil(len(update) * k / size))
        batches = batches[: config["limit_train_batches"]]
        for first in range(0, len(batches), k):
            if step == config["max_steps"]:
                return
            yield batches[first : first + k]
            step += 1
        epoch += 1


def gradient(model: nn.Module, parameters: Parameters, loss: torch.Tensor) -> Parameters:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@torch.no_grad()
def descend(
    config: dict[str, Any], step: int, parameters: Parameters, momentum: Parameters, gradients: Parameters
) -> None:
    """SGD with momentum and L2 decay, learning rate from a warm-up and half a cosine."""
    optimizer, scheduler = config["optimizer"], config["scheduler"]
    warmup, total, final = scheduler["warmup_steps"], config["max_steps"], scheduler["final"]
    if step < warmup:
        factor = (step + 1) / warmup
    else:
        factor = final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup - 1))) / 2
    for name, p in parameters.items():
        decay = optimizer["weight_decay"] if p.dim() > 1 or optimizer["decay_norms_and_biases"] else 0.0
        momentum[name] = optimizer["momentum"] * momentum[name] + gradients[name] + decay * p
        p -= optimizer["lr"] * factor * momentum[name]


def validation(config: dict[str, Any], model: nn.Module) -> dict[str, float]:
    """Loss, acc1, acc5 and macro F1 over the validation samples, by numpy's sorting and by scikit-learn.
    The loss is weighted by class, and never smoothed."""
    inputs, labels = images(config["data"]["val_samples"], 2)
    scores = model(torch.from_numpy(inputs)).detach().numpy()
    shifted = scores - scores.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    weight = np.array(config["loss"]["weight"] or [1.0] * scores.shape[1])[labels]
    best = np.argsort(-scores, 1, kind="stable")
    return {
        "loss": (weight * losses).sum() / weight.sum(),
        "acc1": (best[:, 0] == labels).mean(),
        "acc5": (best[:, :5] == labels[:, None]).any(1).mean(),
        "f1": float(f1_score(labels, best[:, 0], average="macro")),
    }
