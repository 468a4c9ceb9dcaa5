"""The gate: on a GPU no update waits, a log line and a validation wait once, a checkpoint's copy twice."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.null_gpu import count, machine
from tests.pictures import cifar, image_folder
from trainer.metrics.classification import ClassObjective
from trainer.metrics.sums import SumsObjective

pytestmark = pytest.mark.skipif(bool(machine.missing()), reason=f"a null GPU needs {machine.missing()}")

CONFIGS = str(Path(__file__).parents[1] / "tasks" / "conf")
LINES = 3
"""Lines of a case: after updates 1, 5 and 9 of 11. The first two are waited for where the next is due, the last where
the checkpoint is."""
RUN = ["data.num_workers=0", "max_steps=12", "execution.log_every=4"]
RESNET = ["+recipe=resnet50_random", "model=resnet18", "data.image_size=64", "data.batches=12", "data.val_batches=2"]
SQUARES = ["data=squares", "data.global_batch_size=32"]
LENET = [*SQUARES, "model=lenet", "model.image_size=8"]
STACK = [
    *(*SQUARES, "data.labels=side", "model=lenet", "model._target_=tests.null_gpu.stack.Stack", "+model.depth=2"),
    *("~model.image_size", "~model.in_channels"),
]
"""Convolutions with batch norm, fewer than ResNet's: what waits does not depend on how many."""
COLOURED = ["model=lenet", "model.in_channels=3", "model.image_size=32"]
POWERSGD = "strategy.powersgd.start_step=2"
EVERYTHING = ["+optimizer.fused=true", "strategy.clip_norm=1.0", "ema.decay=0.99"]


class Case(NamedTuple):
    """A run, and the most waits of each of its phases where they are not those of the gate.

    Attributes:
        workers, overrides: of the run. update: of one update. line: of all lines, ``checkpoint``, ``validation`` and
        ``average`` (a validation of the averaged weights), ``best`` (the copy of the best model) and ``after`` (what
        follows from a validation: plateau, early stop, callbacks) of one.
    """

    workers: int
    overrides: list[str]
    update: float = 0
    line: int = LINES - 1
    checkpoint: int = 2
    validation: int = 1
    average: int = 1
    best: int = 1
    after: int = 0


SHORT = {
    "fp16": Case(1, [*LENET, "data.labels=side", "strategy=single", "precision=fp16", *EVERYTHING]),
    "collective": Case(2, [*RESNET, "strategy=collective", "strategy.clip_norm=1.0"]),
}
"""Cases of ``make test``."""
OTHERS = {
    "single": Case(1, [*RESNET, "strategy=single"]),
    "local_sgd": Case(2, [*RESNET, "strategy=local_sgd", "strategy.k_steps=2"]),
    "buffers": Case(2, [*STACK, "strategy=collective", "strategy.buffers=average", "execution.log_workers=true"]),
    "ema": Case(2, [*RESNET, "strategy=collective", *EVERYTHING]),
    # its workers meet in each forward of a validation, to leave it together
    "sharded": Case(
        2, [*RESNET, "strategy=sharded", "strategy.clip_norm=1.0", "ema.decay=0.9"], validation=2, average=2
    ),
    "sharded_optimizer": Case(
        2, [*RESNET, "strategy=sharded", "strategy.shard=optimizer", "strategy.clip_norm=1.0", "ema.decay=0.9"]
    ),
    "sync_batch_norm": Case(2, [*STACK, "strategy=collective", "strategy.sync_batch_norm=true"]),
    "fp16_not_fused": Case(1, [*STACK, "strategy=single", "precision=fp16", "optimizer=rmsprop"], update=1),
    "skip": Case(2, [*STACK, "strategy=collective", "on_nonfinite=skip"], update=1),
    # each worker skips by itself, and their counts are added up in each line
    "skip_local_sgd": Case(2, [*STACK, "strategy=local_sgd", "on_nonfinite=skip"], update=1, line=LINES),
    "line_of_batch": Case(1, [*STACK, "strategy=single", "execution.line_of=batch"]),
    "uneven": Case(2, [*LENET, "data.labels=side", "strategy=collective", "loss.weight=[1.0,2.0]"]),
    "uneven_local_sgd": Case(2, [*LENET, "data.labels=side", "strategy=local_sgd", "loss.weight=[1.0,2.0]"]),
    # its first 11 updates are all warm-up: what a capture records waits for nothing
    "captured": Case(2, [*LENET, "data.labels=side", "strategy=collective", "execution.cuda_graph=true", *EVERYTHING]),
    "regression": Case(2, [*LENET, "data.labels=place", "strategy=collective"]),
    # the first worker's numbers decide, and a callback of any worker
    "after_validation": Case(
        2,
        [
            *(*LENET, "data.labels=side", "strategy=collective", "scheduler=plateau", "early_stop.metric=val/loss"),
            "callbacks=[{_target_: tests.null_gpu.stack.Quiet}]",
        ],
        after=2,
    ),
    "nadam": Case(1, [*LENET, "data.labels=side", "strategy=single", "optimizer._target_=torch.optim.NAdam"]),
    "schedule_free": Case(1, [*STACK, "strategy=single", "optimizer=schedule_free"]),
    "muon": Case(1, [*STACK, "strategy=single", "optimizer=muon"]),
    "layer_decay": Case(1, [*STACK, "strategy=single", "optimizer.layer_decay=0.9"]),
    "dgc": Case(
        2, [*LENET, "data.labels=side", "strategy=collective", "strategy.comm_hook=dgc", "strategy.dgc.min_size=100"]
    ),
    "hierarchical": Case(
        4, [*LENET, "data.labels=side", "strategy=collective", "strategy.reduce_group=2", "strategy.comm_streams=2"]
    ),
    "post_local": Case(2, [*STACK, "strategy=local_sgd", "strategy.begin=gradients", "strategy.begin_step=20"]),
    "diloco": Case(2, [*STACK, "strategy=local_sgd", "strategy.k_steps=2", "strategy.outer.momentum=0.9"]),
    # how far the next average is follows from losses
    "adaptive": Case(2, [*STACK, "strategy=local_sgd", "strategy.k_steps=2", "strategy.adaptive=true"], update=1),
    # torch's own hook waits after each of its buckets (one here), and for two copies before its first
    "powersgd": Case(
        2, [*LENET, "data.labels=side", "strategy=collective", "strategy.comm_hook=powersgd", POWERSGD], update=1.1
    ),
    # the host ranks the scores at once: what follows is computed there, in each line too
    "binary": Case(
        1,
        [
            *SQUARES,
            *("data.labels=bright", "strategy=single", "model=lenet", "model._target_=tests.null_gpu.stack.Logit"),
            *("~model.image_size", "~model.in_channels"),
        ],
        line=LINES,
    ),
    # the host ranks the scores of each label before the workers exchange them
    "multi_label": Case(2, [*LENET, "data.labels=traits", "strategy=collective"], validation=2),
}
LONG = {
    *("buffers", "skip_local_sgd", "line_of_batch", "uneven_local_sgd", "regression", "after_validation", "nadam"),
    *("layer_decay", "muon", "fp16_not_fused", "multi_label", "post_local"),
}
"""Cases of ``make test-long``: what each does has a part in another case."""
CASES = [
    *(pytest.param(case, id=name) for name, case in SHORT.items()),
    *(
        pytest.param(case, id=name, marks=pytest.mark.long if name in LONG else pytest.mark.all)
        for name, case in OTHERS.items()
    ),
]


def phases(library: Path, workers: int, overrides: list[str]) -> dict[str, Any]:
    """What a run does in each of its phases, see :mod:`tests.null_gpu.count`."""
    question = {"workers": workers, "overrides": [*RUN, *overrides], "config_dir": CONFIGS}
    answer = machine.run(library, "tests.null_gpu.count", question, workers)
    assert answer["device"] == "NVIDIA H100 80GB HBM3"
    found: dict[str, Any] = answer["phases"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_gpu_but_what_needs_its_numbers(library: Path, case: Case) -> None:
    found = phases(library, case.workers, case.overrides)
    assert (found["update"]["times"], found["line"]["times"]) == (count.UPDATES, LINES)
    most = {
        "start": case.update,
        "update": case.update * count.UPDATES,
        "line": case.line,
        "checkpoint": case.checkpoint,
        "validation": case.validation,
        "validation of the average": case.average,
        "best model": case.best,
        "after a validation": case.after,
    }
    too_many = {name: one["waits"] for name, one in found.items() if sum(n for *_, n in one["waits"]) > most[name]}
    assert not too_many
    assert "best model" in found or case not in SHORT.values()  # the numbers of other tasks may be no best ones


@pytest.mark.all
@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_samples_on_the_gpu_are_cut_mirrored_and_resized_without_a_wait(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    typed = ["data.cache=device", "data.erasing=0.5", "data.mixup=0.2", "data.batch_size=4", "strategy=single"]
    if kind == "arrays":
        typed += ["data=cifar10", f"data.root={cifar(tmp_path)}", *COLOURED]
    else:
        typed += [
            "data=imagefolder",
            f"data.root={image_folder(tmp_path, per_class=24)}",
            "data.image_size=32",
            *COLOURED,
        ]
    found = phases(library, 1, typed)
    most = {"start": 0, "update": 0, "line": LINES - 1, "validation": 1}
    assert {name: found[name]["waits"] for name in most if sum(n for *_, n in found[name]["waits"]) > most[name]} == {}
    cut = sum(n for line, n in found["update"]["lines"].items() if line.startswith("data/augment/views.py"))
    assert cut, "by kernels of the GPU"


@pytest.mark.all
def test_a_longer_model_has_no_more_kernels_besides_its_own(library: Path) -> None:
    """Kernels of averages, checks, metrics and lines are not launched for each tensor."""
    options = [*SQUARES, "data.labels=side", "strategy=single", "on_nonfinite=skip", "ema.decay=0.99"]
    model = ["model=lenet", "model._target_=tests.null_gpu.stack.Stack", "~model.image_size", "~model.in_channels"]
    short, long = (phases(library, 1, [*options, *model, f"+model.depth={depth}"]) for depth in (2, 6))
    for name in ("update", "line"):
        growing = {line: n for line, n in long[name]["lines"].items() if n > short[name]["lines"].get(line, 0)}
        assert all(_of_the_model(line) for line in growing), growing
    assert sum(long["update"]["lines"].values()) > 1.5 * sum(short["update"]["lines"].values()), "the model's own"


def _of_the_model(line: str) -> bool:
    """Whether the kernels of a line are the model's forward and backward, or torch's own step of the optimizer: its
    kernels for many tensors do not know those without values."""
    file, _, number = line.partition(":")
    if file in ("backward", "optim/updater.py"):
        return True
    forwards = {"metrics/classification.py": ClassObjective.forward, "metrics/sums.py": SumsObjective.forward}
    if file not in forwards:
        return False
    lines, first = inspect.getsourcelines(forwards[file])
    return first <= int(number) < first + len(lines)


def test_the_null_gpu_counts_each_way_to_wait(library: Path) -> None:
    """Otherwise the other tests could not fail."""
    found = machine.run(library, "tests.null_gpu.waiting", None)
    assert found == {
        "item": 1,
        "copy cuda to cpu": 3,  # blocking, into memory that is not pinned, and by cpu()
        "copy cpu to cuda": 2,  # blocking, and from memory that is not pinned
        "boolean index": 1,
        "bincount": 1,
        "nonzero": 1,
        "event": 2,  # one is polled
        "synchronize": 1,
    }


def test_the_table_of_the_page_has_the_numbers_of_the_gate() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (\d).*\|$", page.partition("| a process | waits |")[2], re.MULTILINE))
    usual, fp16, skip = Case(1, []), OTHERS["fp16_not_fused"], OTHERS["skip"]
    assert {name: int(number) for name, number in rows.items()} == {
        "an update": usual.update,
        "an update in fp16, with an optimizer that is not fused": fp16.update,
        "an update with `on_nonfinite=skip` or `rewind`": skip.update,
        "an update of a sparse table": 1,
        "an update with `strategy.comm_hook=powersgd`": int(OTHERS["powersgd"].update),
        "an update of a parameter server's worker": 1,
        "a line of the log": 1,
        "a validation": usual.validation,
        "what follows a validation on several GPUs": OTHERS["after_validation"].after / 2,
        "the copy for a checkpoint": usual.checkpoint,
        "the copy of the best model": usual.best,
    }
