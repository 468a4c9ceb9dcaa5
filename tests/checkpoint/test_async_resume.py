"""Workers without a common step go on with more or fewer workers and servers: each batch is applied once over all
lives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import runs
from tests.checkpoint.test_identity import back_at, check_equal
from tests.ledgers import applied
from trainer.checkpoint import store
from trainer.strategies.builtin import PserverSspDeclaration

RUN = (
    "+recipe=wide_and_deep",
    "data.train_rows=400",
    "data.val_rows=301",
    "data.hash_size=501",
    "model.hidden=[8]",
    "data.batch_size=16",
    "limit_val_batches=2",
    "epochs=2",
    "tracking=none",
    "execution.threads=1",
    "checkpoint.every_steps=3",
    "checkpoint.every_epochs=null",
    "checkpoint.keep_last=1000",
    "checkpoint.background=false",
    "verbosity=quiet",
    "strategy.ledger=true",
    "strategy.persistables=false",
    "optimizer=adam",
)
BATCHES, EPOCHS = 400 // 16, 2
MODES = {
    "async": ("strategy=pserver_async", "strategy.evict_after=1000", "strategy.delay_compensation=0.1"),
    "async, merged": ("strategy=pserver_async", "strategy.max_merge_var_num=3", "strategy.send_wait_times=2"),
    "ssp": ("strategy=pserver_ssp", "strategy.staleness=1"),
    "geo": ("strategy=pserver_geo", "strategy.k_steps=3"),
}
YES = "resume.allow_changes=true"


def of(workers: int, servers: int) -> tuple[str, ...]:
    return f"launch.nproc={workers}", f"launch.servers={servers}"


def run(folder: Path, *command: str) -> None:
    ended = runs.trainer(*RUN, *command, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]


def within(whole: Path, epoch: int) -> int:
    """The number of a checkpoint in the middle of an epoch."""
    found = {about.step: about for path in store.found(whole / "checkpoints") if (about := store.about(path)).update}
    inside = sorted(step for step, about in found.items() if about.epoch == epoch)
    return inside[len(inside) // 2]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a mode with two workers and two servers."""
    known: dict[str, Path] = {}

    def whole(mode: str) -> Path:
        if mode not in known:
            known[mode] = tmp_path_factory.mktemp("two") / "whole"
            run(known[mode].parent, *MODES[mode], *of(2, 2), "hydra.run.dir=whole")
        return known[mode]

    return whole


def check_once(folder: Path, servers: int) -> None:
    """Server 0, which every life has, has applied each batch of each epoch once, the others no batch twice; a life's
    servers the same ones."""
    ledgers = [applied(folder / f"ledger.{server}.tsv") for server in range(servers)]
    for found in ledgers:
        assert set(found.values()) == {1}, found.most_common(3)
    for epoch in range(EPOCHS):
        assert sum(e == epoch for e, _, _ in ledgers[0]) == BATCHES
        assert all({one for one in found if one[0] == epoch} <= {*ledgers[0]} for found in ledgers)
    last = {one for one in ledgers[0] if one[0] == EPOCHS - 1}
    assert all(last <= {*found} for found in ledgers)


@pytest.mark.all
@pytest.mark.parametrize("mode", ["async, merged", pytest.param("ssp", marks=pytest.mark.long), "geo"])
def test_each_batch_is_applied_once_over_lives_of_other_sizes(
    mode: str, two: Callable[[str], Path], tmp_path: Path
) -> None:
    """The blocks stay those of the first life, whatever a life of the later sizes would cut: the last one begins within
    an epoch."""
    back_at(two(mode), within(two(mode), 0), tmp_path / "run")
    again = (*MODES[mode], "hydra.run.dir=run", "resume=auto", YES)
    run(tmp_path, *again, *of(3, 3))
    check_once(tmp_path / "run", 3)
    back_at(tmp_path / "run", within(tmp_path / "run", 1), tmp_path / "alone")
    run(tmp_path, *MODES[mode], "hydra.run.dir=alone", "resume=auto", YES, *of(1, 1))
    check_once(tmp_path / "alone", 1)
    [*_, begun] = re.findall(r"goes on from .* after update (\d+)", (tmp_path / "alone" / "workerlog.0").read_text())
    assert runs.read(tmp_path / "alone" / "lives.json")[-1]["first"] == int(begun), (
        "worker 0's, as the curves' axis has it"
    )
    assert runs.read(tmp_path / "alone" / "result.json")["samples"] == 16 * EPOCHS * BATCHES


@pytest.mark.all
@pytest.mark.parametrize(
    "mode",
    [
        ("strategy=pserver_async", "strategy.independent_recv_thread=false"),
        pytest.param(("strategy=pserver_ssp", "strategy.staleness=0"), marks=pytest.mark.long),
    ],
)
def test_other_servers_change_nothing_for_one_worker(mode: tuple[str, ...], tmp_path: Path) -> None:
    """Parameters, rows, what Adam remembers of both, ages and the schedule: bit by bit."""
    told = (*mode, "strategy.evict_after=20", "execution.log_every=5", "strategy.ledger=false")
    run(tmp_path, *told, *of(1, 1), "hydra.run.dir=whole")
    back_at(tmp_path / "whole", within(tmp_path / "whole", 1), tmp_path / "other")
    run(tmp_path, *told, *of(1, 3), "hydra.run.dir=other", "resume=auto")
    check_equal(tmp_path / "whole", tmp_path / "other")


@pytest.mark.all
def test_what_cannot_be_carried_over_is_named_before_anything_starts(
    two: Callable[[str], Path], tmp_path: Path
) -> None:
    for mode, lost in (
        ("geo", "train again on what they had not exchanged; what the workers' optimizers remember of rows"),
        ("async", "the parameters that workers had pulled: a gradient of the first update is not compensated"),
    ):
        back_at(two(mode), within(two(mode), 1), tmp_path / mode)
        before = sorted((tmp_path / mode).rglob("*"))
        told = (*RUN, *MODES[mode], *of(3, 2), f"hydra.run.dir={mode}", "resume=auto")
        if mode == "geo":
            refused = runs.trainer(*told, cwd=tmp_path)
            assert refused.returncode == 2
            assert "the run had 2 workers and 2 servers, and has 3 and 2" in refused.stderr and lost in refused.stderr
        shown = runs.trainer(*told, YES, "plan=true", "verbosity=normal", cwd=tmp_path)
        assert all(part in shown.stdout for part in lost.split("; ")), shown.stdout
        assert sorted((tmp_path / mode).rglob("*")) == before


@pytest.mark.parametrize(
    ("told", "refusal"),
    [
        (("data.batch_size=8",), "a batch has 8 samples, and had 16 in "),
        (("data.batch_size=8",), "work is handed out in blocks of batches. Type instead: data.batch_size=16"),
        (("limit_train_batches=20",), "limit_train_batches was None, is 20"),
        (
            ("data.work=static",),
            "each with its own part of an epoch (data.work=static). Type instead: launch.workers=2",
        ),
    ],
)
def test_what_does_not_fit_the_blocks_is_refused(
    told: tuple[str, ...], refusal: str, two: Callable[[str], Path], tmp_path: Path
) -> None:
    mode = "async, merged"
    back_at(two(mode), within(two(mode), 1), tmp_path / "run")
    refused = runs.trainer(*RUN, *MODES[mode], *of(3, 2), *told, "hydra.run.dir=run", "resume=auto", cwd=tmp_path)
    assert refused.returncode == 2 and refusal in refused.stderr, refused.stderr


class Mine(PserverSspDeclaration):
    """A strategy of a user's own without a common step."""


@pytest.mark.all
def test_strategy_of_a_user_keeps_its_numbers(tmp_path: Path) -> None:
    """Nobody knows what its workers and servers keep of each other."""
    mine = (*MODES["ssp"], f"strategy._target_={__name__}.Mine", "hydra.run.dir=run")
    run(tmp_path, *mine, *of(2, 2), "epochs=1")
    back_at(tmp_path / "run", within(tmp_path / "run", 0), tmp_path / "other")
    told = (*RUN, *mine, "epochs=1", "hydra.run.dir=other", "resume=auto", YES)
    for others, refusal in (
        (of(3, 2), "has 2 workers, each with a state of its own. Type instead: launch.workers=2"),
        (of(2, 3), "has 2 servers, each with its own count of the work that is done. Type instead: launch.servers=2"),
    ):
        refused = runs.trainer(*told, *others, cwd=tmp_path)
        assert refused.returncode == 2 and refusal in refused.stderr, refused.stderr
    hosts = runs.trainer(*RUN, *mine, "launch.nproc=1", "launch.nnodes=1:2", "launch.insecure=true", cwd=tmp_path)
    assert hosts.returncode == 2 and "has workers with states of their own, whose number stays" in hosts.stderr


@pytest.mark.all
def test_batches_of_each_worker_are_as_many_together(tmp_path: Path) -> None:
    """limit_train_batches counts those of each worker: with other workers it is another number for the same epoch."""
    run(tmp_path, *MODES["ssp"], *of(2, 1), "limit_train_batches=12", "hydra.run.dir=run")
    back_at(tmp_path / "run", within(tmp_path / "run", 1), tmp_path / "other")
    command = (*RUN, *MODES["ssp"], *of(3, 1), "hydra.run.dir=other", "resume=auto")
    refused = runs.trainer(*command, "limit_train_batches=12", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is of 2 workers with 12 each. Type instead: limit_train_batches=8" in refused.stderr
    run(tmp_path, *command[len(RUN) :], "limit_train_batches=8")
    assert len(applied(tmp_path / "other" / "ledger.0.tsv")) == EPOCHS * 24
