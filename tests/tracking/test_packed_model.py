"""MLflow's model takes along the modules that the model imports, and nothing else of the user's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import importlib_metadata
import numpy as np
import pytest
import torch
from mlflow.utils import requirements_utils
from safetensors.torch import save_file
from torch import nn

from tests.runs import environment

NET = """
import importlib
from typing import TYPE_CHECKING
from torch import nn
from . import parts
from .deep.er import scale
from shared_tool import add
if TYPE_CHECKING:
    from .never_imported import nothing

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))

    def forward(self, images):
        hook = importlib.import_module("own_pkg.by" + "_name")
        from .lazily import one
        return hook.same(self.layers(images)) * scale * parts.two + add(one)
"""
FILES = {
    "own_pkg/__init__.py": "",
    "own_pkg/net.py": NET,
    "own_pkg/parts.py": "two = 2.0\n",
    "own_pkg/deep/__init__.py": "",
    "own_pkg/deep/er.py": "from .. import parts\nscale = 3.0 / parts.two\n",
    "own_pkg/by_name.py": "def same(x):\n    return x\n",
    "own_pkg/lazily.py": "one = 1.0\n",
    "shared_tool.py": "def add(x):\n    return x + 0.5\n",
}
OTHERS = {
    "own_pkg/.env": "HF_TOKEN=c4nary",
    "own_pkg/credentials.json": '{"password": "c4nary"}',
    "own_pkg/.git/config": "url = https://me:c4nary@host",
    "own_pkg/.hidden.py": "x = 'c4nary'",
    "own_pkg/sibling.py": "password = 'c4nary'",
    "own_pkg/never_imported.py": "nothing = 'c4nary'",
    "own_pkg/deep/notes.txt": "c4nary",
    "other_top.py": "c4nary = 1",
}
LOAD = """
import sys, numpy as np, mlflow
np.save(sys.argv[3], mlflow.pyfunc.load_model(sys.argv[1]).predict(np.load(sys.argv[2])))
import own_pkg.net, trainer
print(own_pkg.net.__file__, trainer.__file__)
"""


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """The packed model, and the modules that are said to be in it."""
    for name, content in {**FILES, **OTHERS}.items():
        path = tmp_path / "user" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "user" / "own_pkg" / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "user" / "own_pkg" / "linked.py").symlink_to(tmp_path / "user" / "other_top.py")
    run = tmp_path / "run"
    run.mkdir()
    model = {"_target_": "own_pkg.net.Net", "num_classes": 3}
    (run / "model.json").write_text(
        json.dumps({"model": model, "mean": None, "std": None, "fp64": False, "rows": None})
    )
    torch.manual_seed(3)
    layer = nn.Linear(4, 3)
    save_file({f"layers.1.{name}": t.detach() for name, t in layer.named_parameters()}, run / "model.safetensors")
    np.savez_compressed(run / "example.npz", inputs=np.float32([[1.0, 2.0, 3.0, 4.0]]))
    expected = layer(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).detach().numpy() * 3.0 + 1.5
    np.save(tmp_path / "expected.npy", expected)
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    from trainer.tracking.logged_model import Choice, pack_model

    asked: list[None] = []
    monkeypatch.setattr(requirements_utils, "_MODULES_TO_PACKAGES", None)
    monkeypatch.setattr(importlib_metadata, "packages_distributions", lambda: asked.append(None) or {})
    before = sys.path[:]
    folder, taken = pack_model(run, Choice("model", run / "model.safetensors", "last", 1, ()))
    assert sys.path == before and not asked, "MLflow looks for all files of all packages"
    assert f"torch=={torch.__version__.partition('+')[0]}\n" in (folder / "requirements.txt").read_text()
    folder.parent.rename(tmp_path / "packed")
    (tmp_path / "user").rename(tmp_path / "gone")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own_pkg", "shared_tool")]:
        del sys.modules[name]
    return tmp_path / "packed" / "model", taken


@pytest.mark.all
def test_the_packed_model_has_what_it_imports_and_predicts_elsewhere(
    packed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, taken = packed
    assert sorted(taken) == sorted(FILES), "what is taken along is named"
    code = folder / "code"
    files = {str(path.relative_to(code)) for path in code.rglob("*") if not path.is_dir()}
    assert files == {"trainer.zip", *FILES}
    with zipfile.ZipFile(code / "trainer.zip") as sources:
        names = set(sources.namelist())
        assert {Path(name).suffix for name in names} == {".py"}
        assert {"trainer/config/instantiate.py", "trainer/__init__.py"} <= names
        assert not any(b"c4nary" in sources.read(name) for name in names)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert sum(path.is_file() for path in folder.rglob("*")) - len(FILES) <= 11, "MLflow lists each file"
    assert [
        p for p in folder.rglob("*") if p.is_file() and (b"c4nary" in p.read_bytes() or b"root:x:0" in p.read_bytes())
    ] == []
    np.save(tmp_path / "in.npy", np.float32([[1.0, 2.0, 3.0, 4.0]]))
    bare = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(tmp_path / "in.npy"), str(tmp_path / "out.npy")],
        cwd=tmp_path,
        env={**bare, "PYTHONPATH": os.pathsep.join([])},
        capture_output=True,
        text=True,
        timeout=2000,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(code / "own_pkg" / "net.py"),
        str(code / "trainer.zip" / "trainer" / "__init__.py"),
    ]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), np.load(tmp_path / "expected.npy"), rtol=1e-5)
