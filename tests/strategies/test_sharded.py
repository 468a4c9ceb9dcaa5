"""strategy=sharded: what a worker holds, how a model is divided, and checkpoints that any number of workers loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from tests import runs
from tests.checkpoint.test_identity import back_at
from tests.strategies.launching import BASE, Case, launched, payload
from trainer.checkpoint import store
from trainer.errors import UserError
from trainer.models.blocks import chosen, fits, repeated
from trainer.worker.settings import seed_all

RUN = (
    "+recipe=digits_lenet",
    "precision=fp64",
    "optimizer=adamw",
    "strategy.clip_norm=0.5",
    "ema.decay=0.9",
    "data.global_batch_size=36",
    "data.test_fraction=0.1",
    "tracking=none",
    "execution.threads=1",
    "epochs=2",
    "limit_train_batches=5",
    "data.val_batch_size=100",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=100",
    "checkpoint.background=false",
    "device=cpu",
    "verbosity=quiet",
)
SHARDED = ("strategy=sharded", "launch=forkserver")


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*RUN, *command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


def distance(one: Path, other: Path, file: str) -> float:
    truth, found = load_file(one / file), load_file(other / file)
    assert truth.keys() == found.keys()
    return max((truth[name] - found[name]).abs().max().item() for name in truth)


def metrics(run_dir: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run_dir / "result.json").read_text())["metrics"]
    return {name: value for name, value in found.items() if not name.startswith("perf/")}


@pytest.mark.all
@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (3, ()),
        (3, ("strategy.shard=optimizer",)),
        pytest.param(2, ("strategy.shard=gradients",), marks=pytest.mark.all),
        pytest.param(4, ("strategy.shard_group=2",), marks=pytest.mark.all),
        pytest.param(4, ("strategy.shard=optimizer", "strategy.shard_group=2"), marks=pytest.mark.all),
    ],
)
def test_checkpoints_pass_between_any_numbers_of_workers_and_other_strategies(
    workers: int, more: tuple[str, ...], warm: None, tmp_path: Path
) -> None:
    """A chain of runs, each from the checkpoint of the one before, comes where one process does."""
    run(tmp_path, "strategy=single", "hydra.run.dir=alone")
    run(tmp_path, *SHARDED, *more, f"launch.nproc={workers}", "hydra.run.dir=shards")
    check_divided(tmp_path / "shards", workers, more)
    back_at(tmp_path / "shards", 3, tmp_path / "then")
    run(
        tmp_path,
        "strategy=collective",
        "launch.nproc=2",
        "hydra.run.dir=then",
        "resume=auto",
        "resume.allow_changes=true",
    )
    back_at(tmp_path / "then", 6, tmp_path / "last")
    again = more[:1] if "strategy.shard=optimizer" in more else ()
    run(tmp_path, *SHARDED, *again, "launch.nproc=2", "hydra.run.dir=last", "resume=auto", "resume.allow_changes=true")
    for ended in ("shards", "then", "last"):
        for file in ("model.safetensors", "model_ema.safetensors", "checkpoints/best.safetensors"):
            assert distance(tmp_path / "alone", tmp_path / ended, file) < 1e-10, (ended, file)
        assert metrics(tmp_path / ended) == pytest.approx(metrics(tmp_path / "alone"), abs=1e-10)


def check_divided(run_dir: Path, workers: int, more: tuple[str, ...]) -> None:
    """Each worker of the first group has written its shards of the parameters, their average and two numbers of AdamW;
    or, for its own parameters, these two numbers and a count of steps."""
    group, whole_model = 2 if "strategy.shard_group=2" in more else workers, "strategy.shard=optimizer" in more
    folder = store.newest_whole(run_dir / "checkpoints")
    assert folder is not None
    files = [load_file(folder / store.part_of(worker)) for worker in range(workers)]
    held = [sum(t.numel() for name, t in file.items() if name.endswith("|piece")) for file in files]
    model = load_file(run_dir / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in model.values())
    assert sum(held) == (2 * numbers + len(model) if whole_model else 4 * numbers)
    assert min(held[:group]) > 0 and held[group:] == [0] * (workers - group)
    if whole_model:
        assert max(held) == 2 * max(tensor.numel() for tensor in model.values()) + 1
        return
    assert max(held) < 1.2 * 4 * numbers / group
    assert max(tensor.numel() for name, tensor in files[0].items() if not name.endswith("|piece")) < 10_000


def test_a_worker_holds_its_part_between_two_updates(warm: None, tmp_path: Path) -> None:
    case = Case("held", ("optimizer=adam", "limit_train_batches=2", "max_steps=100"))
    answers = [one["answers"][0] for one in launched("sharded", 2, {"held": case}, tmp_path)["worker"].values()]
    whole = answers[0]["whole"]
    for what, numbers in (("parameters", whole), ("optimizer", 2 * whole)):
        assert sum(answer[what] for answer in answers) == numbers
        assert max(answer[what] for answer in answers) < 0.6 * numbers
    assert all(answer["gathered"] == 0 for answer in answers)
    # Gloo's own reduce-scatter is an all-reduce: twice the bytes
    assert all(answer["parts"] > 0 and answer["reduce-scatters"] == 0 for answer in answers)


def test_the_first_worker_alone_builds_the_whole_model(warm: None, tmp_path: Path) -> None:
    typed, base = (
        ("model=resnet18", "data=random_images", "data.image_size=32", "precision=fp32"),
        ("max_steps=2", *BASE[-4:]),
    )
    config = payload("single", 1, typed, base)["config"]
    seed_all(config["seed"])
    truth = torchvision.models.resnet18(num_classes=config["model"]["num_classes"]).state_dict()
    case = Case("built", (*typed, "strategy.sync_batch_norm=true"), base=base)
    workers = launched("sharded", 3, {"built": case}, tmp_path)["worker"]
    answers = [workers[rank]["answers"][0] for rank in range(3)]
    for answer in answers:
        found = {**answer["parameters"], **answer["buffers"]}
        assert found.keys() == truth.keys() and all((found[name] == truth[name].numpy()).all() for name in truth)
    whole, largest = sum(one.nbytes for one in truth.values()), max(one.nbytes for one in truth.values())
    assert answers[0]["most"] > whole
    assert max(answer["most"] for answer in answers[1:]) < whole / 3 + 1.2 * largest


def test_a_worker_keeps_the_optimizers_state_of_its_parameters_alone(warm: None, tmp_path: Path) -> None:
    """Adagrad makes its state before the first update, and fused SGD in the first one."""
    rules = {"adam": 2, "adagrad": 1, "momentum": 1}
    more = {"momentum": ("execution.fused_optimizer=true",)}
    cases = {
        name: Case("held", (f"optimizer={name}", *more.get(name, ()), "limit_train_batches=2", "max_steps=100"))
        for name in rules
    }
    workers = launched("sharded_optimizer", 2, cases, tmp_path)["worker"].values()
    for number, slots in enumerate(rules.values()):
        answers = [one["answers"][number] for one in workers]
        whole, largest = answers[0]["whole"], 20 * 20 * 25
        assert [answer["parameters"] for answer in answers] == [whole, whole]
        assert sorted(answer["optimizer"] for answer in answers) == [slots * (whole - largest), slots * largest]


def test_the_plan_says_what_each_worker_holds(tmp_path: Path) -> None:
    numbers = 20 * 25 + 20 + (largest := 20 * 20 * 25) + 20 + 80 * 10 + 10  # of LeNet for 8 x 8
    kb = "{:.1f} kB".format
    of_shard = {
        "parameters": f"{kb(2 * numbers / 1000)} of parameters (1/4), {kb(2 * numbers / 1000)} of gradients (1/4), "
        f"{kb(4 * numbers / 1000)} of optimizer state (1/4), {kb(2 * numbers / 1000)} of averaged weights (1/4), "
        f"{kb(3 * 8 * numbers / 1000)} of parameters that are gathered, ",
        "optimizer": f"{kb(8 * numbers / 1000)} of parameters, {kb(8 * numbers / 1000)} of gradients, "
        f"{kb(2 * 8 * largest / 1000)} of optimizer state, {kb(8 * numbers / 1000)} of averaged weights, ",
    }
    for shard, row in of_shard.items():
        command = (*RUN, "strategy=sharded", f"strategy.shard={shard}", "launch.nproc=4", "verbosity=normal")
        ended = runs.trainer(*command, "plan=true", cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        said = " ".join(ended.stdout.split())
        assert f"each worker: {row}" in said, ended.stdout
        assert re.search(r"about [\d.]+ kB on each worker: .* [\d.]+ kB for a batch of 9 samples", said), ended.stdout


class Layer(nn.Module):
    def __init__(self, inner: nn.Linear | None = None) -> None:
        super().__init__()
        self.inner, self.norm = inner or nn.Linear(4, 4), nn.LayerNorm(4)


def test_the_blocks_are_those_of_the_model() -> None:
    resnet: Any = torchvision.models.resnet18()
    stages = [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4]
    assert repeated(resnet) == [block for stage in stages for block in stage]
    vit: Any = torchvision.models.vit_b_32()
    assert repeated(vit) == list(vit.encoder.layers)
    assert repeated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == [], "layers alone are not worth an exchange"


def test_blocks_that_share_a_parameter_are_gathered_with_the_model() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"one": Layer(shared), "two": Layer(shared), "three": Layer()})
    assert repeated(model) == [model["three"]]


def test_a_pattern_is_a_name_or_a_class() -> None:
    block = torchvision.models.resnet18().layer1[0]
    assert fits("BasicBlock", "layer1.0", block) and fits("layer1.*", "layer1.0", block)
    assert not fits("layer2.*", "layer1.0", block) and not fits("Basic", "layer1.0", block)
    with pytest.raises(UserError, match=r"strategy\.wrap=Block: no module of the model has this name or class"):
        chosen(torchvision.models.resnet18(), ["layer1.*", "Block"], "strategy.wrap")


@pytest.mark.all
@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
def test_16_bits_on_the_way_change_little(shard: str, warm: None, tmp_path: Path) -> None:
    parameters = ("strategy.param_dtype=bf16",) if shard == "parameters" else ()
    bits = (f"strategy.shard={shard}", *parameters, "strategy.reduce_dtype=bf16", "precision=fp32")
    run(tmp_path, "strategy=single", "precision=fp32", "optimizer=momentum", "hydra.run.dir=alone")
    run(tmp_path, *SHARDED, *bits, "optimizer=momentum", "launch.nproc=2", "hydra.run.dir=bits")
    assert 0 < distance(tmp_path / "alone", tmp_path / "bits", "model.safetensors") < 0.02


@pytest.mark.all
@pytest.mark.parametrize("synced", [False, True])
def test_batch_norm_has_its_statistics_in_full_where_parameters_are_gathered_in_16_bits(
    synced: bool, warm: None, tmp_path: Path
) -> None:
    few = ("optimizer.lr=0.001", f"strategy.sync_batch_norm={str(synced).lower()}", "max_steps=4")
    own = ("+recipe=resnet50_flowers_demo", "model=resnet18", "data.global_batch_size=8", "validation=false")
    for folder, gathered in (("whole", "full"), ("bits", "bf16")):
        more = (f"strategy.param_dtype={gathered}", f"hydra.run.dir={folder}", "tracking=none", "launch.nproc=2")
        ended = runs.trainer(*own, *SHARDED, *few, *more, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr[-3000:]
    found = load_file(tmp_path / "bits" / "model.safetensors")
    assert {t.dtype for n, t in found.items() if "running" in n} == {torch.float32}
    assert 0 < distance(tmp_path / "whole", tmp_path / "bits", "model.safetensors") < 0.05
