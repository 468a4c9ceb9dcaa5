"""What a user's callback does wrong ends the run by its name, and no callback is left untold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import RunFailed
from trainer.worker import loop
from trainer.worker.callbacks import Callbacks
from trainer.worker.nonfinite import Stop
from trainer.worker.training import Progress, Watchers


class Recorded:
    """Raises in one hook; notes what it is told of the end."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.seen: list[BaseException] = []
        setattr(self, hook, self._break)
        self.error = error

    def _break(self, event: Any) -> None:
        raise self.error

    def on_exception(self, event: Any) -> None:
        self.seen.append(event.error)


class Untrained:
    """A training of no updates."""

    class strategy:
        lr = 0.1

    class reporting:
        class report:
            ended = ""

    def __init__(self, callback: Recorded, folder: Path) -> None:
        made = [("callbacks[0] (Recorded)", callback)]
        callbacks = Callbacks(made, 0, 1, folder, 1, torch.nn.Linear(1, 1))
        self.progress, self.watchers = Progress(), Watchers(Stop(), callbacks)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_end"])
@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("enough"), ValueError("no")])
def test_what_breaks_in_a_hook_is_a_failure_by_name_and_the_others_are_told(
    hook: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that calls sys.exit() ended the run as if all were well."""
    monkeypatch.setattr(loop, "_fit", lambda run: {})
    callback = Recorded(hook, error)
    with pytest.raises(RunFailed, match=rf"callbacks\[0\] \(Recorded\) broke in {hook}, .*test_callbacks.py:\d+"):
        loop.fit(Untrained(callback, tmp_path))  # type: ignore[arg-type]
    assert len(callback.seen) == 1 and isinstance(callback.seen[0], RunFailed)


def test_an_interruption_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_fit", lambda run: {})
    callback = Recorded("on_train_start", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        loop.fit(Untrained(callback, tmp_path))  # type: ignore[arg-type]
    assert isinstance(callback.seen[0], KeyboardInterrupt)
