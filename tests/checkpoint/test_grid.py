"""The identity of resumed and undisturbed runs, over strategy x merged gradients x averaged weights x reading processes
x position.

Each strategy meets each value of each other axis, and each pair of values of the axes is met; ``make test-long`` plays
all cells of one worker's runs. Where exactly a run is interrupted is drawn by the cell's name. Runs are of the testing
process and of processes that the session's forkserver forks.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

import trainer
from tests import runs
from tests.checkpoint.interrupting import AT
from tests.checkpoint.test_identity import back_at, check_equal, lines
from trainer.checkpoint import store, tensor_tree
from trainer.errors import RunFailed, RunPreempted

BATCHES, VALIDATED, EPOCHS = 7, 3, 2
"""Of an epoch, of a validation, of a run."""
COMMON = (
    f"epochs={EPOCHS}",
    f"limit_train_batches={BATCHES}",
    f"limit_val_batches={VALIDATED}",
    "data.batch_size=16",
    "tracking=none",
    "execution.threads=1",
    "execution.log_every=2",
    "checkpoint.keep_last=100",
    "checkpoint.background=false",
    "checkpoint.every_epochs=null",
    "verbosity=quiet",
    "callbacks=[{_target_:tests.checkpoint.interrupting.Interrupting}]",
)
EVERY_STEP, WHEN_ASKED = "checkpoint.every_steps=1", "checkpoint.every_minutes=1000"
DIGITS = ("+recipe=digits_lenet", "model._target_=tests.checkpoint.dropping.DroppingAlways")
IMAGES = ("+recipe=cifar10_convnet", "data.download=false", "data.mixup=0.2", "data.cutmix=1.0")
CLICKS = (
    "+recipe=wide_and_deep",
    "data.train_rows=1500",
    "data.val_rows=301",
    "data.hash_size=501",
    "model.hidden=[8]",
)
ALONE = (
    (
        *DIGITS,
        "optimizer=adam",
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.metric=val/loss",
        "scheduler.gamma=0.5",
    ),
    IMAGES,
    (*DIGITS, "sampler=class_balanced", "precision=bf16", "optimizer=adamw"),
    (
        *DIGITS,
        "optimizer=schedule_free",
        "data.prefetch=2",
        "early_stop.metric=val/loss",
        "early_stop.min_delta=100",
        "early_stop.patience=7",
    ),
    (*DIGITS, "scheduler=cosine", "scheduler.warmup_epochs=1"),
    ("+recipe=digits_lenet", "execution.val_every_steps=3", "optimizer=muon"),
    (*DIGITS, "sampler=repeated_augmentation", "precision=fp16", "optimizer.momentum=0.9"),
    (*DIGITS, "execution.val_every_steps=2", "optimizer=rmsprop"),
)
"""What else is told to one worker, a cell each."""
SERVED = (*CLICKS, "launch.nproc=1", "data.lease_batches=2")
ZERO = (*DIGITS, "launch.nproc=2", "strategy=sharded", "strategy.shard=optimizer")
STRATEGIES = {
    "collective": (
        (
            *DIGITS,
            "launch.nproc=2",
            "strategy=collective",
            "strategy.buffers=average",
            "strategy.comm_hook=powersgd",
            "strategy.powersgd.start_step=3",
        ),
        (
            *CLICKS,
            "launch.nproc=2",
            "strategy=collective",
            "launch.servers=null",
            "data.read=scatter",
            "optimizer=adam",
        ),
    ),
    "local_sgd": (
        (
            *(*DIGITS, "launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=3", "strategy.adaptive=true"),
            *("strategy.begin=gradients", "strategy.begin_step=2"),
        ),
        (
            *(*DIGITS, "launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=2", "optimizer.momentum=0.9"),
            *("strategy.outer.momentum=0.9", "strategy.exchange=int8", "strategy.streaming.fragments=2"),
            "strategy.streaming.delay=1",
        ),
    ),
    "pserver_sync": (
        (*SERVED, "strategy=pserver_sync", "strategy.wire=int8", "strategy.evict_after=3"),
        (*DIGITS, "launch.nproc=2", "launch.servers=2", "strategy=pserver_sync", "optimizer=adam"),
    ),
    "pserver_async": (
        (
            *SERVED,
            "strategy=pserver_async",
            "strategy.delay_compensation=0.1",
            "strategy.staleness_power=0.5",
            "strategy.entry.count=2",
        ),
        (*DIGITS, "launch.nproc=1", "strategy=pserver_async", "data.work=static"),
    ),
    "pserver_ssp": (
        (*SERVED, "strategy=pserver_ssp", "strategy.staleness=0", "optimizer=adam"),
        (*DIGITS, "launch.nproc=1", "strategy=pserver_ssp"),
    ),
    "pserver_geo": (
        (
            *DIGITS,
            "launch.nproc=1",
            "strategy=pserver_geo",
            "strategy.k_steps=3",
            "strategy.overlap=false",
            "optimizer=adam",
        ),
        (*SERVED, "strategy=pserver_geo", "strategy.k_steps=3", "strategy.overlap=false"),
    ),
    "dgc": tuple(
        (
            *(*DIGITS, "launch.nproc=2", "strategy=collective", "strategy.comm_hook=dgc", "optimizer.momentum=0.9"),
            *("strategy.dgc.min_size=100", "strategy.dgc.sparsity=[0.5,0.9]", "strategy.dgc.rampup_step=4"),
            f"strategy.dgc.rampup_begin_step={begin}",
        )
        for begin in (0, 3)
    ),
    "ways": (
        (*DIGITS, "launch.nproc=4", "strategy=collective", "strategy.reduce_group=2", "strategy.comm_streams=2"),
        (*DIGITS, "launch.nproc=2", "strategy=collective", "strategy.comm_streams=2", "strategy.bucket_cap_mb=0.01"),
    ),
    "sharded": (
        (*DIGITS, "launch.nproc=2", "strategy=sharded", "optimizer=adamw", "strategy.clip_norm=1.0"),
        (*DIGITS, "launch.nproc=2", "strategy=sharded", "strategy.shard=gradients", "optimizer.momentum=0.9"),
    ),
    "sharded optimizer": (
        (*ZERO, "optimizer=adamw", "strategy.clip_norm=1.0", "execution.channels_last=true"),
        (*ZERO, "optimizer=adagrad", "scheduler=cosine"),  # which makes its state before the first step
    ),
}

AVERAGED = ("single", "collective", "dgc", "ways", "sharded", "sharded optimizer", "local_sgd", "pserver_sync")
"""The others refuse averaged weights."""


@dataclass(frozen=True)
class Cell:
    """A run, and where it is interrupted: ``within`` an epoch, at its ``end``, in an ``update``, in a
    ``validation``."""

    strategy: str
    merge: int
    average: bool
    readers: int
    positions: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def name(self) -> str:
        average, readers = "average" if self.average else "plain", f"{self.readers} readers"
        return ", ".join([self.strategy, f"merge {self.merge}", average, readers, *self.positions])

    @property
    def command(self) -> tuple[str, ...]:
        average = "0.9" if self.average else "null"
        return (
            *self.told,
            *COMMON,
            f"strategy.gradient_merge.k_steps={self.merge}",
            f"ema.decay={average}",
            f"data.num_workers={self.readers}",
        )


def cells() -> list[Cell]:
    """All of one worker, two of each other strategy."""
    found = []
    for (merge, average, readers), told in zip(itertools.product((1, 2), (True, False), (0, 1)), ALONE, strict=True):
        odd = (merge + readers) % 2, (average + readers) % 2
        positions = ("within", "end")[odd[0]], ("update", "validation")[odd[1]]
        found.append(Cell("single", merge, average, readers, positions, told))
    for number, (strategy, both) in enumerate(STRATEGIES.items()):
        first, readers = bool(number % 2), number // 2 % 2
        for merge, average, positions in ((1, first, ("update",)), (2, not first, ("validation", "end"))):
            found.append(Cell(strategy, merge, average and strategy in AVERAGED, readers, positions, both[merge - 1]))
            readers = 1 - readers
    return found


CELLS = {cell.name: cell for cell in cells()}


def is_long(cell: Cell) -> bool:
    """Of one worker's cells, half meet all pairs of values."""
    return cell.strategy == "single" and (cell.merge + cell.average + cell.readers) % 2 == 1


QUICK = {name: cell for name, cell in CELLS.items() if not is_long(cell)}


def test_each_value_of_an_axis_meets_each_of_every_other_one() -> None:
    values: dict[str, dict[str, set[object]]] = {
        name: {
            "strategy": {cell.strategy},
            "merge": {cell.merge},
            "average": {cell.average},
            "readers": {cell.readers},
            "position": {position.replace("within", "update") for position in cell.positions},
        }
        for name, cell in QUICK.items()
    }
    for one, other in itertools.combinations(("strategy", "merge", "average", "readers", "position"), 2):
        met = {pair for axes in values.values() for pair in itertools.product(axes[one], axes[other])}
        ours, theirs = ({value for axes in values.values() for value in axes[axis]} for axis in (one, other))
        missing = {*itertools.product(ours, theirs)} - met
        if {one, other} == {"strategy", "average"}:
            missing -= {(strategy, True) for strategy in STRATEGIES if strategy not in AVERAGED}
        assert not missing, (one, other)


@pytest.mark.all
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in CELLS if name not in QUICK)]
)
def test_resumed_run_is_the_undisturbed_one(
    name: str, warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell, drawn = CELLS[name], random.Random(name)
    trainer.run([*cell.command, EVERY_STEP, "hydra.run.dir=whole/run"])
    updates = int(runs.read(Path("whole/run/plan.json"))["length"]["steps_per_epoch"])
    assert updates == -(-BATCHES // cell.merge)
    if "launch.nproc=2" in cell.told:
        second = tensor_tree.read(store.folder_of(Path("whole/run/checkpoints"), 1) / store.part_of(1), ["model"])
        of_its_own = cell.strategy in ("local_sgd", "dgc") or "strategy.comm_hook=powersgd" in cell.told
        assert (second["model"] is None) != of_its_own, "the first one's part has it for all"
    for position in cell.positions:
        run = Path(position) / "run"
        if position in ("within", "end"):
            within = [step for step in range(1, EPOCHS * updates) if step % updates]
            back_at(Path("whole/run"), updates if position == "end" else drawn.choice(within), run)
        else:
            interrupt(cell, position, drawn, updates)
        trainer.run([*cell.command, EVERY_STEP, f"hydra.run.dir={run}", "resume=auto"])
        check_equal(Path("whole/run"), run)


def interrupt(cell: Cell, position: str, drawn: random.Random, updates: int) -> None:
    """Run until an error in the last of the batches that make an update, or until a signal in a validation."""
    Path(position).mkdir()
    rank = drawn.randrange(2) if "launch.nproc=2" in cell.told else 0
    if position == "update":
        update = drawn.randrange(updates - 1) * cell.merge + cell.merge - 1 + drawn.randrange(EPOCHS) * BATCHES
        Path(position, AT).write_text(f"breaks {rank} training {update}")
    else:
        batches = VALIDATED * (1 + cell.average)  # a signal in the last one comes too late
        number = drawn.randrange(EPOCHS) * batches + drawn.randrange(batches - 1)
        Path(position, AT).write_text(f"leaves {rank} validation {number}")
    with pytest.raises(RunFailed if position == "update" else RunPreempted):
        trainer.run(
            [*cell.command, EVERY_STEP if position == "update" else WHEN_ASKED, f"hydra.run.dir={position}/run"]
        )
    assert not Path(position, AT).exists()
    if position == "validation":
        [checkpoint] = store.found(Path(position, "run", "checkpoints"))
        about = store.about(checkpoint)
        assert about.update and about.epoch == (about.step - 1) // updates, "its state is that before the validation"
        assert not any("val/loss" in values for step, _, values in lines(Path(position, "run")) if step == about.step)
