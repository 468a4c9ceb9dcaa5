"""What people see: 80 columns without a broken path, files without filling, what is waited for, the best so far."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import __main__
from trainer.cli import last_lines
from trainer.cli.sweep_table import METRICS, Row, show_sweep
from trainer.config.run_config import RunConfig
from trainer.host import hardware
from trainer.job import plan_table
from trainer.job.result import Result
from trainer.launch.forkserver import _shown
from trainer.terminal import bar
from trainer.terminal.screen import Screen
from trainer.terminal.streams import teed
from trainer.tracking.mlflow_tracker import MlflowTracker

RUN = "6ec23ca3c72c43c8b4d7ab39a4e58a38"
FOLDER = "/srv/somebody/outputs/digits_lenet/2026-11-22_10-52-31"
LONG = f"ATTENTION: what was wanted is at {FOLDER} and not elsewhere, so run {RUN} looks at {FOLDER}/workerlog.0"


class Terminal:
    """A terminal of 80 columns as standard output, and what was written to it."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @contextlib.contextmanager
    def shown(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """Lines of text without colours, complete after the block."""
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        lines: list[str] = []
        with open(self.side, "w", encoding="utf-8") as screen:
            monkeypatch.setattr(sys, "stdout", screen)
            yield lines
            screen.flush()
            os.set_blocking(self.main, False)
            found = b""
            with contextlib.suppress(BlockingIOError, OSError):
                while part := os.read(self.main, 1 << 16):
                    found += part
        os.close(self.main)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.decode())
        lines += text.replace("\r\n", "\n").replace("\r", "\n").splitlines()


WORKER = SimpleNamespace(role="worker", rank=0)


def everything() -> None:
    """Each kind of line."""
    out = Screen()
    out.print(LONG, style="bold red")
    out.facts("Plan of x", [("strategy", LONG), ("run folder", FOLDER), ("left out", f"1 image: {FOLDER}/" + "x" * 20)])
    out.fact("results", f"{FOLDER}  (curves.png, confusion.png, mistakes.png, model.safetensors, result.json)")
    out.rows(
        "Sweep",
        ["job", "overrides", "status", "val/loss", "best val/acc1", "seconds"],
        [
            ["0", f"data.root={FOLDER} optimizer.lr=0.1", "done", "0.1", "0.9582", "20.6"],
            ["1", "a=1", "not started", "", "", ""],
        ],
        1,
    )
    out.command("repeat", ["python", "-m", "trainer", f"data.root={FOLDER}", f"weights={FOLDER}/model.safetensors"], 10)


def test_at_80_columns_no_path_and_no_id_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal().shown(monkeypatch) as lines:
        everything()
    assert max(map(len, lines)) <= 80
    for whole, times in (
        (FOLDER, 10),
        (RUN, 2),
        (f"{FOLDER}/workerlog.0", 2),
        (f"weights={FOLDER}/model.safetensors", 1),
    ):
        assert sum(line.count(whole) for line in lines) == times, whole
    assert not [line for line in lines if line != line.rstrip()]
    [first] = [line for line in lines if line.startswith("repeat")]
    assert first.endswith(" \\"), "a shell takes the next line as well"


JOBS = [
    Row(
        ("+recipe=x", f"optimizer.lr={n}e-4"),
        Result("done", "", metrics={m: 1234.5 for m in METRICS}, best={"val/acc1": 0.5}, seconds=1234.5),
        "val/acc1",
    )
    for n in (1, 2)
] + [Row(("+recipe=x", "optimizer.lr=3e-4"), Result("not started", ""))]


@pytest.mark.parametrize("columns", [200, 80, 60])
def test_a_sweeps_table_fits_the_terminal_and_says_what_is_left_out(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Terminal(columns).shown(monkeypatch) as lines:
        monkeypatch.setenv("COLUMNS", str(columns))
        show_sweep(JOBS, Path.cwd() / "sweep", [str(number) for number in range(len(JOBS))])
    shown = [line for line in lines if line.startswith((" ", "*", "job "))]
    assert max(map(len, shown)) <= columns
    header, *rows = shown
    assert len(rows) == (3 if columns == 200 else 6) and header.split()[-3:] == ["best", "val/acc1", "seconds"]
    assert [row.endswith("1234.5") for row in rows if "done" in row] == [True, True]
    assert [f"optimizer.lr={n}e-4" for n in (1, 2, 3)] == re.findall(r"optimizer\.lr=\S+", "".join(rows))
    told = " ".join(lines)
    assert [
        m
        for m in METRICS
        if m not in header.replace("best val/acc1", "") and f"with {m}" not in told and f", {m}" not in told
    ] == []


@pytest.mark.parametrize(
    ("mode", "metrics", "said"),
    [
        ("eval", {"val/acc1": 0.5}, "359 samples evaluated in 3.4 s. val/acc1: 0.50000"),
        ("predict", {"predict/rows": 359.0}, "359 rows predicted in 3.4 s."),
        ("predict", {"predict/files": 359.0}, "359 images predicted in 3.4 s."),
    ],
)
def test_the_last_line_is_english(mode: str, metrics: dict[str, float], said: str) -> None:
    done = Result("done", "", metrics=metrics, samples=359, seconds=3.4, mode=mode)
    assert (
        last_lines._done(done, SimpleNamespace(plan=SimpleNamespace(topology=SimpleNamespace(here=[WORKER])))) == said
    )  # type: ignore[arg-type]


def test_what_is_redirected_is_neither_wrapped_nor_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        everything()
    lines = (tmp_path / "out").read_text().splitlines()
    assert LONG in lines and f"strategy    {LONG}" in lines
    assert not [line for line in lines if line != line.rstrip()]
    assert lines[-1] == f"repeat    python -m trainer data.root={FOLDER} weights={FOLDER}/model.safetensors"


STATUS = {
    "state": "running",
    "epoch": 3,
    "step": 44,
    "total": 88,
    "metrics": {"train/loss": 0.5, "train/acc1": 0.25, "perf/samples_per_s": 99.4},
}
BEST = {"metric": "val/acc1", "value": 0.95, "step": 22}


@pytest.mark.parametrize(
    ("status", "peers", "said"),
    [
        (None, {}, ["starting: importing", "0/88"]),
        (
            {"state": "starting", "doing": "first update, compiling the model", "step": 0},
            {},
            ["first update, compiling the model"],
        ),
        (STATUS, {}, ["epoch 3", "44/88", "loss 0.5000  acc1 0.2500  99 samples/s"]),
        (STATUS | {"step": 89, "total": 89}, {}, ["89/89"]),
        (
            STATUS | {"best": BEST},
            {1: 40, 0: 44, 10: 7},
            ["best acc1 0.9500", "worker 0: 44  worker 1: 40  worker 10: 7"],
        ),
    ],
    ids=["importing", "compiling", "running", "beyond", "apart"],
)
def test_the_bar_fills_the_line_and_says_what_there_is(
    status: dict[str, Any] | None,
    peers: dict[int, int],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps(status))
    for rank, step in peers.items():
        (tmp_path / f"status.{rank}.json").write_text(json.dumps({"epoch": 0, "step": step}))

    @contextlib.contextmanager
    def once(seconds: float, look: Callable[[], None]) -> Iterator[None]:
        look()
        yield

    monkeypatch.setattr(bar, "_every", once)
    with Terminal().shown(monkeypatch) as lines, bar.bar(tmp_path, 88):
        pass
    shown = "\n".join(lines)
    assert all(part in shown for part in said), shown
    assert {len(line) for line in lines if "━" in line} == {80}
    assert max(map(len, lines)) == 80


def test_quiet_shows_neither_plan_nor_bar_nor_lines_and_warnings_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: Any = SimpleNamespace(
        chosen=SimpleNamespace(precision="fp32"),
        remarks=SimpleNamespace(lacks=[], concern="too many outputs", left_out=["launch.nproc=2"]),
        topology=SimpleNamespace(insecure=False, roles={"worker": 1}, device="cpu"),
        data=SimpleNamespace(facts=SimpleNamespace(attention="", stand_in="drawn flowers")),
        strategy=SimpleNamespace(name="single"),
        length=SimpleNamespace(total_steps=1),
        batches=SimpleNamespace(global_size=32),
        paths=SimpleNamespace(run_dir="x"),
    )
    plan_table.show_plan(plan, "quiet")
    plan_table.show_briefly(plan, "quiet")
    said = "ATTENTION: too many outputs\nATTENTION: drawn flowers\n"
    assert capsys.readouterr().out == 2 * said
    plan_table.show_briefly(plan)
    assert (
        capsys.readouterr().out
        == f"single, 1 worker, cpu, fp32; 1 update of 32 samples; x\nleft out: launch.nproc=2\n{said}"
    )
    with bar.preparing("quiet") as show:
        show("drawing", 1, 2)
    with (tmp_path / "log").open("w") as log, teed(log, quiet=True):
        print("[Epoch 0, batch 0] loss: 1")
        print("a warning", file=sys.stderr)
    told = capsys.readouterr()
    assert told.out == "" and told.err == "a warning\n"
    assert (tmp_path / "log").read_text() == "[Epoch 0, batch 0] loss: 1\na warning\n"


def test_debug_shows_what_every_process_prints_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members: list[Any] = []
    for name, rank in (("worker", 0), ("worker", 1), ("server", 0)):
        log = tmp_path / f"{name}log.{rank}"
        log.write_text(f"I am {rank}\nand done\n")
        kind = type("Member", (SimpleNamespace,), {"__str__": lambda self: f"{self.role.name} {self.rank}"})
        members.append(kind(handle=SimpleNamespace(log=log), role=SimpleNamespace(name=name), rank=rank))

    def shown(verbosity: str) -> list[str]:
        for screen in _shown(members, verbosity, {}):
            screen.end()
        return sorted(capsys.readouterr().out.splitlines())

    assert shown("quiet") == []
    assert shown("normal") == ["I am 0", "and done"]
    assert shown("debug") == sorted(
        f"{who} | {line}"
        for who, n in (("worker 0", 0), ("worker 1", 1), ("server 0", 0))
        for line in (f"I am {n}", "and done")
    )


def test_a_broken_run_says_where_its_folder_and_its_best_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ready: Any = SimpleNamespace(
        plan=SimpleNamespace(mode="train", paths=SimpleNamespace(run_dir=str(tmp_path / "run")))
    )
    last_lines.say_broken(ready)
    assert capsys.readouterr().out == "", "nothing was begun"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "workerlog.0").touch()
    (tmp_path / "run" / "status.json").write_text(json.dumps({"best": BEST}))
    last_lines.say_broken(ready)
    assert capsys.readouterr().out == "\nleft      run  (workerlog.N)\n"
    (tmp_path / "run" / "checkpoints" / "best.safetensors").touch()
    last_lines.say_broken(ready)
    assert (
        capsys.readouterr().out.splitlines()[2]
        == "best      run/checkpoints/best.safetensors  (val/acc1 0.95000 at update 22)"
    )


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (
            "sqlite:///{here}/mlflow.db",
            (
                "mlflow ui   then "
                "http://127.0.0.1:5000/#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=trainer"
            ),
        ),
        (
            "sqlite:////other/mlflow.db",
            "mlflow ui --backend-store-uri sqlite:////other/mlflow.db   then http://127.0.0.1:5000/#/",
        ),
        (
            "http://127.0.0.1:8080/",
            "http://127.0.0.1:8080/#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=trainer",
        ),
    ],
    ids=["here", "elsewhere", "server"],
)
def test_the_address_opens_the_view_of_trainings(
    uri: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = MlflowTracker(tmp_path, uri.format(here=tmp_path))
    tracker.run_id, tracker.group = RUN, "7"
    plan = SimpleNamespace(
        updates_of="", objective=SimpleNamespace(best="val/acc1"), topology=SimpleNamespace(here=[WORKER])
    )
    ready: Any = SimpleNamespace(plan=plan, checked=SimpleNamespace(config=RunConfig()))
    ended = {"mlflow": {"id": RUN, "where": tracker.where()}}
    last_lines.say_result(Result("done", str(tmp_path), RUN, "7", steps=1, tracking=ended), ready, ["+recipe=x"])
    [look] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("look")]
    assert said in look and look.endswith(f"(run {RUN})")


class NarrowScreen(Screen):
    """A screen of 80 columns."""

    def __init__(self) -> None:
        super().__init__(width=80)
        self.seen = True


@pytest.mark.all
@pytest.mark.parametrize("recipe", ["digits_lenet", "resnet50_random", "wide_and_deep"])
def test_the_plan_of_an_ordinary_run_is_one_screen_and_debug_has_the_rest(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(plan_table, "Screen", NarrowScreen)
    assert __main__.main([f"+recipe={recipe}", "plan=true"]) == 0
    brief = capsys.readouterr().out.splitlines()
    assert len(brief) < 24 and max(map(len, brief)) <= 80
    assert __main__.main([f"+recipe={recipe}", "plan=true", "verbosity=debug"]) == 0
    whole = capsys.readouterr().out
    assert "Environment of worker 0" in whole and "keep_memory" in whole and len(whole.splitlines()) > 40
