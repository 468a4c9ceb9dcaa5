"""``python -m trainer.checkpoints``: what it tells is what is there, what it exports is the model, and wrong input is a
sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainer as package
from tests.checkpoint import saving
from tests.runs import environment
from trainer.checkpoint import store
from trainer.checkpoint_tools import compare, export, show
from trainer.checkpoints import main
from trainer.errors import UserError

RUN = """
    +recipe=digits_lenet tracking=none epochs=1 limit_train_batches=8 ema.decay=0.9 checkpoint.every_steps=3
    checkpoint.keep_last=5
""".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints after 3, 6 and all 8 updates."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    package.run([*RUN, f"hydra.run.dir={folder}"])
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_list_tells_each_checkpoint_and_which_is_latest_or_damaged(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", str(copied)]) == 0
    shown = capsys.readouterr().out
    table = shown.splitlines()[1:]
    assert max(map(len, table)) <= 80
    columns, *rows = (line.split() for line in table)
    assert columns == ["step", "epoch", "metric", "value", "size", "age", "state"]
    assert [row[:3] for row in rows] == [["8", "1", "val/acc1"], ["6", "0", "val/acc1"], ["3", "0", "val/acc1"]]
    assert rows[0][-2:] == ["whole,", "latest"] and rows[1][-1] == rows[2][-1] == "whole"
    assert float(rows[0][3]) == pytest.approx(
        store.about(store.found(copied / "checkpoints")[0]).watched.value, rel=1e-3
    )
    (store.folder_of(copied / "checkpoints", 6) / "worker-0.safetensors").write_bytes(b"12")
    (store.folder_of(copied / "checkpoints", 3) / "COMPLETE").unlink()
    assert main(["list", str(copied / "checkpoints")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "worker-0.safetensors: 2 bytes, but" in shown and "COMPLETE: the file is missing" in shown


def test_verify_names_the_damaged_file_and_says_so_by_its_exit_code(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(copied)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"step-00000000{step}  whole  {files} files" for step, files in ((8, 3), (6, 2), (3, 2))
    ], "the best weights are in the one after the validation"
    path = store.folder_of(copied / "checkpoints", 6) / "worker-0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said = "step-000000006  DAMAGED  worker-0.safetensors: its content is not what was written: the checksum differs"
    for looked, lines in ((copied, 3), (path.parent, 1)):
        assert main(["verify", str(looked)]) == 1
        shown = capsys.readouterr().out.splitlines()
        assert said in shown and len(shown) == lines
    assert main(["show", str(path.parent)]) == 2
    assert "worker-0.safetensors: its content is not what was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "when"), [("verify", "before"), ("verify", "after"), ("list", "before"), ("list", "after")]
)
def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, when: str
) -> None:
    """A run that goes on retires its older ones; that may be before a checkpoint is looked at, and between two
    looks."""
    check, folder = store.check, store.folder_of(copied / "checkpoints", 6)

    def late(looked: Path, *told: Any, **more: Any) -> Path:
        if looked == folder and when == "before" and folder.exists():
            store._remove(folder)
        found = check(looked, *told, **more)
        if looked == folder and folder.exists():
            store._remove(folder)
        return found

    monkeypatch.setattr(store, "check", late)
    assert main([command, str(copied)]) == 0
    shown = capsys.readouterr().out.splitlines()
    if command == "verify":
        assert "DAMAGED" not in "".join(shown) and shown[1] == "step-000000006  retired meanwhile"
    else:
        assert [line.split()[0] for line in shown[2:]] == ["8", "3"]


def test_show_tells_position_files_and_config(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(store.folder_of(run / "checkpoints", 6))]) == 0
    shown = capsys.readouterr().out
    for said in (
        "6 of 8",
        "0, after 6 of its updates",
        "not measured after this update",
        "single",
        f"torch {torch.__version__}",
        "checkpoint.json",
        "worker-0.safetensors",
        "_target_: trainer.models.lenet.LeNet",
    ):
        assert said in shown


def test_list_show_and_verify_need_no_torch(run: Path) -> None:
    code = (
        "import sys; from trainer.checkpoints import main; assert not any(main([c, sys.argv[1]]) for c in "
        "('list', 'show', 'verify')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], env=environment(), check=True, capture_output=True)


def test_diff_tells_position_config_and_the_greatest_difference_of_each_tensor(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.run([*RUN, f"hydra.run.dir={tmp_path}/other", "optimizer.lr=0.1"])
    three, six = (store.folder_of(run / "checkpoints", step) for step in (3, 6))
    assert main(["diff", str(three), str(six)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "3", "->", "6"] in shown and ["the", "same"] in shown
    one, other = (export.built(folder, False).state_dict() for folder in (three, six))
    for name, tensor in one.items():
        assert [name, f"{(tensor.double() - other[name].double()).abs().max().item():.4g}", "at", "most"] in shown
    assert main(["diff", str(run), str(tmp_path / "other")]) == 0
    assert "optimizer.lr was 0.05, is 0.1" in capsys.readouterr().out
    package.run([*RUN, f"hydra.run.dir={tmp_path}/on", f"resume={three}"])
    assert main(["diff", str(run), str(tmp_path / "on")]) == 0
    assert "resume.path" not in capsys.readouterr().out, "from where a run went on is no difference of the training"
    assert main(["diff", str(six), str(six)]) == 0
    assert "bit by bit" in capsys.readouterr().out


def test_nan_and_other_kinds_are_compared() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert compare.same(nan, nan.clone()) and not compare.same(nan, one) and not compare.same(one, one.double())
    assert not compare.same(torch.tensor([0.0, 1.0]), nan)
    assert compare.distance(one * 1j, one * 2j) == 1 and compare.distance(torch.empty(0), torch.empty(0)) == 0


def test_exported_weights_are_the_runs_own_files_byte_by_byte(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "m.safetensors")]) == 0
    assert main(["export", str(run), str(tmp_path / "e"), "--ema", "--format", "safetensors"]) == 0
    assert (tmp_path / "m.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert (tmp_path / "e").read_bytes() == (run / "model_ema.safetensors").read_bytes()
    assert main(["export", str(run), str(tmp_path / "m.pt")]) == 0
    state, wanted = torch.load(tmp_path / "m.pt", weights_only=True), load_file(run / "model.safetensors")
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert "model of step-000000008" in capsys.readouterr().out


@pytest.mark.parametrize("size", [0, 100])
def test_a_cut_example_counts_as_none(copied: Path, tmp_path: Path, size: int) -> None:
    with (copied / "example.npz").open("r+b") as file:
        file.truncate(size)
    assert export._example_inputs(copied, torch.float32).shape == (2, 1, 8, 8)
    (copied / "plan.json").unlink()
    assert main(["export", str(copied), str(tmp_path / "m.pt2")]) == 2


@pytest.mark.parametrize("left", ["example.npz", "plan.json"])
def test_an_exported_program_gives_what_the_model_gives_for_any_batch(copied: Path, tmp_path: Path, left: str) -> None:
    if left != "example.npz":
        (copied / "example.npz").unlink()
    out = tmp_path / "m.pt2"
    assert main(["export", str(copied), str(out)]) == 0
    program = torch.export.load(out).module()
    model = export.built(store.folder_of(copied / "checkpoints", 8), False)
    inputs = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(program(inputs), model(inputs), rtol=1e-6, atol=1e-6)
    (copied / "plan.json").unlink()
    if left != "example.npz":
        assert main(["export", str(copied), str(out)]) == 2


class Off(nn.Module):
    """Gives what another gives, and a bit more."""

    def __init__(self, program: nn.Module, by: float) -> None:
        super().__init__()
        self.program, self.by = program, by

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.program(inputs) + self.by


@pytest.mark.all
@pytest.mark.parametrize(("by", "refused"), [(1.0, True), (float("nan"), True), (0.01, True), (1e-7, False)])
def test_a_program_that_gives_something_else_is_refused(
    by: float,
    refused: bool,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is read back from the file counts: here it gives other values than the model."""
    load = torch.export.load
    monkeypatch.setattr(torch.export, "load", lambda file: SimpleNamespace(module=lambda: Off(load(file).module(), by)))
    assert main(["export", str(run), str(tmp_path / "m.pt2")]) == (2 if refused else 0)
    assert ("the program differs from the model by" in capsys.readouterr().err) == refused
    assert list(tmp_path.iterdir()) == ([] if refused else [tmp_path / "m.pt2"])


class Evaluator:
    """Stands in for ONNX's own."""

    input_names = ("images",)

    def __init__(self, gives: Callable[[np.ndarray], np.ndarray]) -> None:
        self.gives = gives

    def __call__(self, content: bytes) -> Evaluator:
        assert content == b"written"
        return self

    def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [self.gives(feeds.get("images"))]


@pytest.mark.parametrize(
    ("off", "code", "told"),
    [
        (0.0, 0, "its outputs are those of the model"),
        (0.1, 2, "the program differs from the model by 0.1"),
        (None, 0, "its outputs were not compared with the model's: onnx.reference cannot run it: no Resize"),
    ],
)
def test_onnx_outputs_are_compared_or_it_is_said_that_they_are_not(
    off: float | None,
    code: int,
    told: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a stand-in for the packages, which the tests do not need."""
    model = export.built(store.folder_of(run / "checkpoints", 8), False)

    def gives(images: np.ndarray) -> np.ndarray:
        if off is None:
            raise NotImplementedError("no Resize")
        with torch.no_grad():
            return (model(torch.from_numpy(images)) + off).numpy()

    monkeypatch.setitem(sys.modules, "onnx", ModuleType("onnx"))
    monkeypatch.setitem(sys.modules, "onnx.reference", SimpleNamespace(ReferenceEvaluator=Evaluator(gives)))
    monkeypatch.setattr(export, "find_spec", lambda name: name)
    monkeypatch.setattr(
        torch.onnx, "export", lambda program, **how: SimpleNamespace(save=lambda file: file.write(b"written"))
    )
    assert main(["export", str(run), str(tmp_path / "m.onnx")]) == code
    said = capsys.readouterr()
    assert told in " ".join((said.out + said.err).split())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if code else [b"written"])


@pytest.mark.long
def test_onnx_gives_what_the_model_gives(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the packages of the extra, where they are installed."""
    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    out = tmp_path / "m.onnx"
    assert main(["export", str(run), str(out)]) == 0
    assert "its outputs are those of the model" in " ".join(capsys.readouterr().out.split())
    model = export.built(store.folder_of(run / "checkpoints", 8), False)
    evaluator, images = onnx.ReferenceEvaluator(str(out)), torch.randn(5, 1, 8, 8)
    [found] = evaluator.run(None, {evaluator.input_names[0]: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(images).detach(), rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """Has a tensor under two names, and a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_a_tensor_of_two_names_and_a_buffer_outside_the_state_dict(tmp_path: Path) -> None:
    folder = store.folder_of(tmp_path, 1)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    saving.save_model(folder, f"{__name__}.Tied", {"one.weight": weight}, {"table": torch.zeros(3)})
    model = export.built(folder, False)
    assert torch.equal(model.get_parameter("one.weight"), weight) and torch.equal(
        model.state_dict()["two.weight"], weight
    )
    export.exported(folder, tmp_path / "m.safetensors", "safetensors", False)
    assert len(load_file(tmp_path / "m.safetensors")) == 1
    with pytest.raises(UserError, match=r"no average of the weights was kept"):
        export.built(folder, True)


@pytest.mark.parametrize("left", ["no marker", "a marker that cannot be read"])
@pytest.mark.parametrize("there", [b"", b"of another run"])
def test_a_damaged_checkpoint_is_none_that_is_also_at_the_address(left: str, there: bytes, copied: Path) -> None:
    marker = store.folder_of(copied / "checkpoints", 8) / "COMPLETE"
    marker.unlink()
    if left != "no marker":
        marker.mkdir()
    remote: Any = SimpleNamespace(marker=lambda name: there, address="file:///copies/run")
    with pytest.raises(
        UserError,
        match="holds a run whose newest checkpoint is step-000000008, which is not the one at file:///copies/run",
    ):
        show._check_its_own(remote, copied)


WRONG = {
    "nothing": ([], "the following arguments are required: COMMAND"),
    "no such command": (["bogus", "x"], "invalid choice: 'bogus'"),
    "no path": (["list"], "the following arguments are required: PATH"),
    "no such folder": (["list", "nowhere"], "nowhere: there is no such folder"),
    "a folder without": (["verify", "."], "there is no checkpoint in it"),
    "a file": (["show", "file"], "there is no such folder"),
    "no ending": (["export", "RUN", "model"], "its ending is none of .safetensors, .pt, .pt2, .onnx"),
    "no such format": (["export", "RUN", "m", "--format", "h5"], "invalid choice: 'h5'"),
    "a folder for a file": (["export", "RUN", ".", "--format", "pt"], "is a folder"),
    "no folder for it": (["export", "RUN", "gone/m.pt"], "there is no folder gone"),
    "no such checkpoint": (["show", "RUN/checkpoints/step-000000007"], "there is no such folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    typed, says = WRONG[name]
    assert main([word.replace("RUN", str(run)) for word in typed]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out


def test_onnx_that_is_not_installed_is_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert main(["export", str(run), str(tmp_path / "m.onnx")]) == 2
    assert (
        "needs the packages onnx and onnxscript, which are not installed. Type instead: pip install"
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []
