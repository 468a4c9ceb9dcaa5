"""What a one-process run has imported at its last step, and what is on the stack at a step, stay small."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests import runs

MODULES, LINES, STACK = 195, 27_600, 10
"""Limits, which only go down."""
ROOT = Path(__file__).resolve().parent.parent / "trainer"


class Counts:
    """A callback that writes down the stack of the first forward, and the modules that are imported at the end."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, event: Any) -> None:
        event.model.register_forward_hook(self.note_stack)

    def note_stack(self, module: Any, inputs: Any, outputs: Any) -> None:
        if not module.training:  # a validation, which is deeper
            return
        files = dict.fromkeys(frame.filename for frame in traceback.extract_stack())
        (self.folder / "stack").write_text("\n".join(files))

    def on_train_end(self, event: Any) -> None:
        names = [name for name in sys.modules if name.split(".")[0] == "trainer"]
        (self.folder / "modules").write_text("\n".join(str(sys.modules[name].__file__) for name in names))


def test_a_run_of_one_process_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    callback = f"callbacks=[{{_target_: tests.test_imports.Counts, folder: {tmp_path}}}]"
    command = ["+recipe=digits_lenet", "tracking=none", "max_steps=2", f"hydra.run.dir={tmp_path}/run", callback]
    # in an interpreter of its own: the tests' fork server has imported everything
    start = [sys.executable, "-m", "trainer", *command]
    done = subprocess.run(start, cwd=tmp_path, env=runs.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = (tmp_path / "modules").read_text().splitlines()
    assert len(modules) <= MODULES, len(modules)
    lines = sum(len(Path(module).read_text().splitlines()) for module in modules)
    assert lines <= LINES, lines
    stack = [file for file in (tmp_path / "stack").read_text().splitlines() if Path(file).is_relative_to(ROOT)]
    assert len(stack) <= STACK, stack
