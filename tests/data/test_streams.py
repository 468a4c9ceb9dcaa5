"""Streams of a user's own: which samples are trained on, exactly, with one worker and several, and after a resume."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer as package
from tests.runs import points, read, trainer
from trainer.errors import RunFailed, UserError

KEYS = "{samples: 1000000, how: function, known: 0, val: null, val_length: 0}"
EPOCHS, STEPS, BATCH = 2, 5, 4


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """What makes a run on a stream; the options are files, as a user writes them."""
    for group, text in {
        "data/numbers": (
            f"defaults: [/schema/DataConfig@_here_, _self_]\n_target_: tests.data.own_streams.Streams\n"
            f"num_classes: 2\n{KEYS[1:-1].replace(', ', chr(10))}\n"
        ),
        "model/seeing": "_target_: tests.data.own_streams.Linear\nnum_classes: 2\n",
    }.items():
        path = tmp_path / "mine" / f"{group}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        f"hydra.searchpath=[file://{tmp_path}/mine]",
        "model=seeing",
        "data=numbers",
        f"epochs={EPOCHS}",
        f"data.steps_per_epoch={STEPS}",
        f"data.batch_size={BATCH}",
        *"""
            optimizer.lr=0.1 tracking=none device=cpu execution.threads=1 execution.log_every=1
            validation=false
        """.split(),
    ]


def seen(tmp_path: Path, which: str = "train") -> list[list[list[int]]]:
    """Of each worker the samples of its batches."""
    files = [path.read_text().splitlines() for path in tmp_path.glob("seen.*")]
    words_by_file = [[line.split() for line in lines] for lines in files]
    found = [[[int(n) for n in words[1:]] for words in lines if words[0] == which] for lines in words_by_file]
    return sorted(batches for batches in found if batches)


def of_workers(workers: int, epochs: Sequence[range]) -> list[list[list[int]]]:
    """The truth: worker r has each workers-th sample of an update, from r on."""
    size = workers * BATCH
    return [
        [list(epoch[s : s + size][r::workers]) for epoch in epochs for s in range(0, len(epoch), size)]
        for r in range(workers)
    ]


@pytest.mark.parametrize(
    ("readers", "how"),
    [
        (0, "function"),
        (2, "iterable"),
        (0, "by epoch"),
        *(
            pytest.param(*other, marks=pytest.mark.long)
            for other in ((2, "function"), (0, "iterable"), (2, "by epoch"))
        ),
    ],
)
def test_one_process_trains_on_the_first_samples_of_each_epoch_once(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, how: str, readers: int
) -> None:
    monkeypatch.setenv("SEEN", f"{tmp_path}/seen")
    result = package.run(
        [*options, f"data.how='{how}'", f"data.num_workers={readers}", f"hydra.run.dir={tmp_path}/run"]
    )
    later = 1000 if how == "by epoch" else 0
    assert seen(tmp_path) == of_workers(1, [range(20), range(later, later + 20)])
    assert result.samples == 40 and result.steps == 10


@pytest.mark.all
@pytest.mark.parametrize("strategy", ["collective", "pserver_sync", "pserver_async"])
def test_two_workers_share_each_update(tmp_path: Path, options: list[str], strategy: str) -> None:
    arguments = [*options, f"strategy={strategy}", "launch.workers=2", "hydra.run.dir=run", "data.num_workers=1"]
    done = trainer(*arguments, cwd=tmp_path, SEEN=f"{tmp_path}/seen")
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen(tmp_path) == of_workers(2, [range(40)] * 2)
    assert "in its own order, from its beginning in each epoch" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("shard", "workers"),
    [
        ("none", [[[n + 4 * k for n in range(4)] for k in range(5)]] * 2),
        (
            "files",
            [
                [[100 * file + n for file in files for n in range(12)][4 * k : 4 * k + 4] for k in range(5)]
                for files in ((0, 2), (1, 3))
            ],
        ),
    ],
)
def test_workers_may_read_all_of_it_or_files_of_their_own(
    tmp_path: Path, options: list[str], shard: str, workers: list[list[list[int]]]
) -> None:
    arguments = [
        *options,
        f"data.shard={shard}",
        *"data.how=files data.samples=12 epochs=1 launch.workers=2 strategy=collective".split(),
    ]
    if shard == "none":
        arguments = [o for o in arguments if o not in ("data.how=files", "data.samples=12")]
    done = trainer(*arguments, "hydra.run.dir=run", cwd=tmp_path, SEEN=f"{tmp_path}/seen")
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen(tmp_path) == workers


@pytest.mark.all
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_goes_on_in_mid_epoch_as_if_nothing_had_been(tmp_path: Path, options: list[str], workers: int) -> None:
    batch = 4 // workers
    arguments = [
        *options,
        f"data.batch_size={batch}",
        f"launch.workers={workers}",
        *"checkpoint.every_steps=1 checkpoint.background=false data.shuffle_buffer=3 launch.max_restarts=0".split(),
    ]
    whole = trainer(*arguments, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    broken = trainer(*arguments, "data.how=breaking", "hydra.run.dir=run", cwd=tmp_path)
    assert broken.returncode == 1 and "the line is not a number" in broken.stderr + broken.stdout
    resumed = trainer(
        *arguments,
        "resume=auto",
        "resume.allow_changes=true",
        "hydra.run.dir=run",
        cwd=tmp_path,
        SEEN=f"{tmp_path}/seen",
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    skipped = re.search(
        r"epoch 0: the stream is read from its beginning, and (\d+) samples that were trained on are skipped",
        resumed.stdout,
    )
    assert skipped is not None and int(skipped[1]) in (4, 8)
    updates = int(skipped[1]) // 4
    trained = sum(len(batch) for batches in seen(tmp_path) for batch in batches)
    assert trained == 4 * (EPOCHS * STEPS - updates) == read(tmp_path / "run/result.json")["samples"] - int(skipped[1])
    ours, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert points(tmp_path / "whole", "train/loss") == points(tmp_path / "run", "train/loss")


def test_a_buffer_gives_each_sample_once_in_another_order_each_epoch(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", f"{tmp_path}/seen")
    package.run([*options, "data.samples=20", "data.shuffle_buffer=6", f"hydra.run.dir={tmp_path}/run"])
    [batches] = seen(tmp_path)
    numbers = [n for batch in batches for n in batch]
    first, second = numbers[:20], numbers[20:]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second and first != sorted(first)
    assert all(number <= place + 5 for place, number in enumerate(first))  # drawn from those that were read


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_validation_stream_is_read_to_its_end_and_each_sample_counts_once(
    tmp_path: Path, options: list[str], workers: int
) -> None:
    arguments = [o for o in options if o != "validation=false"]
    done = trainer(
        *arguments,
        "epochs=1",
        "data.val=0",
        "data.val_length=13",
        f"launch.workers={workers}",
        "hydra.run.dir=run",
        cwd=tmp_path,
        SEEN=f"{tmp_path}/seen",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = seen(tmp_path, "val")
    assert sorted(n for batches in shares for batch in batches for n in batch) == list(range(13))
    assert read(tmp_path / "run/result.json")["metrics"]["val/loss"] > 0


SENTENCES = {
    "data.samples=13": (
        r"the training stream ended after 13 samples, and an epoch of 5 updates takes 20\. Type "
        r"data\.steps_per_epoch=3"
    ),
    "data.samples=0": r"the training stream is empty: it yields no sample",
    "data.how=breaking": (
        r"the training stream, at sample 9, broke in reading, .*own_streams\.py:\d+: ValueError: the line is not "
        r"a number"
    ),
    "data.how=growing": r"the training stream, near sample 8, has samples of \(5,\), and its facts say \(4,\)",
    "data.how=lone": r"near sample 0, yields a Tensor, not a pair \(input, label\)",
    "data.how=generator": r"is an iterator, which can be read once",
    "data.how=list": r"the training data \(list\) are no stream",
    "data.shard=files": (
        r"has no files that could be dealt out \(data\.shard=files\)\. Return a "
        r"trainer\.data\.streamed\.Files"
    ),
    "validation=true data.val=0": r"the validation stream is empty: it yields no sample",
    "validation=true": r"the validation set is None.*validation=false",
}


@pytest.mark.all
@pytest.mark.parametrize(
    ("more", "readers"),
    [
        pytest.param(more, readers, marks=[pytest.mark.long] * (number % 2 != readers))
        for number, more in enumerate(SENTENCES)
        for readers in (0, 1)
    ],
)
def test_a_stream_that_fails_is_named_in_a_sentence(
    tmp_path: Path, options: list[str], more: str, readers: int
) -> None:
    with pytest.raises(RunFailed) as raised:
        package.run([*options, *more.split(), f"data.num_workers={readers}", f"hydra.run.dir={tmp_path}/run"])
    assert re.search(SENTENCES[more], str(raised.value).partition("\n")[0])


def test_files_of_unequal_length_end_the_run_with_a_sentence_and_no_hang(tmp_path: Path, options: list[str]) -> None:
    arguments = [
        *options,
        "data.shard=files",
        "data.how=files",
        "data.samples=9",
        "launch.workers=2",
        "strategy=collective",
    ]
    done = trainer(*arguments, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "ended after 18 samples of worker" in done.stderr + done.stdout
        and "Type data.steps_per_epoch=4" in done.stderr + done.stdout
    )


REFUSED = {
    "data.steps_per_epoch=null": ("data.steps_per_epoch=null", "unknown length", "data.steps_per_epoch=100"),
    "data.work=leased strategy=pserver_async": ("data.work=leased", "is a stream", "data.work=static"),
    "data.read=scatter": ("data.read=scatter", "is a stream", "data.read=each"),
    "sampler.shuffle=true": ("sampler.shuffle=true", "its own order", "data.shuffle_buffer=1000"),
    "sampler=class_balanced": ("sampler=class_balanced", "no samples to choose from", "sampler=each_once"),
    "sampler.shard=false": ("sampler.shard=false", "is a stream", "data.shard=none"),
    "sampler.padding=contiguous": ("sampler.padding=contiguous", "is a stream", "sampler.padding=strided"),
    "data.batch_size=auto": ("data.batch_size=auto", "again and again", "data.batch_size=32"),
    "data.shard=none data.batch_size=null data.global_batch_size=5 launch.workers=2": (
        "data.global_batch_size=5",
        "as many samples",
        "data.global_batch_size=6",
    ),
    "data=digits data.steps_per_epoch=5": ("data.steps_per_epoch=5", "is for streams", "limit_train_batches=5"),
    "mode=eval weights=x.pt validation=true": ("mode=eval", "tells no number of validation samples", ""),
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_a_stream_cannot_do_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], more: str
) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    arguments = [o for o in options if "data=digits" not in more or not o.startswith("data")]
    asked = [o.replace("x.pt", f"{tmp_path}/x.pt") for o in more.split()]
    with pytest.raises(UserError) as raised:
        package.run([*arguments, *asked, f"hydra.run.dir={tmp_path}/run"])
    for part in REFUSED[more]:
        assert part in str(raised.value)


def test_the_length_that_a_source_knows_is_the_epochs(tmp_path: Path, options: list[str]) -> None:
    arguments = [
        *options,
        "data.steps_per_epoch=null",
        "data.known=27",
        "data.samples=27",
        f"hydra.run.dir={tmp_path}/run",
    ]
    assert package.run(arguments).samples == EPOCHS * 24
