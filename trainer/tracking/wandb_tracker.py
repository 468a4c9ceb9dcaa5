"""Weights & Biases (``tracking=wandb``): points, keys and files of a run, online or kept for ``wandb sync``.

wandb's own collecting is off: the console, the environment, the code and the machine's load. A resumed run keeps its
id, so that ``wandb sync`` and the server make one run of its lives.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.tracking.contract import Point, TrackedRun, Tracker
from trainer.wording import quoted

STATUS = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
"""The exit code by which wandb tells how a run ended."""
SERVER = "https://api.wandb.ai"


class WandbTracker(Tracker):
    """Sends a run to wandb. Its login comes from ``WANDB_API_KEY`` or ``wandb login``.

    Args:
        project: wandb's group of runs; None: the experiment. entity: a user or team; None: the login's own.
        mode: ``online``, or ``offline``: files in the run's folder, which ``wandb sync`` sends later; None:
            ``WANDB_MODE``, else online.
    """

    title = "wandb"
    trouble = "the server does not answer"

    def __init__(
        self, run_dir: Path, project: str | None = None, entity: str | None = None, mode: str | None = None
    ) -> None:
        super().__init__(run_dir)
        self.project, self.entity = project, entity
        self.mode = mode or os.environ.get("WANDB_MODE") or "online"
        self.run: Any = None
        self.url = ""

    def check(self) -> None:
        """Refuse a run without the package, with an unknown mode, or without a login."""
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "tracking=wandb",
                "needs the package wandb, which is not installed",
                "pip install 'trainer[wandb]' (in a checkout: '.[wandb]')",
            )
        offline = "tracking.trackers.wandb.mode=offline"
        if self.mode not in ("online", "offline"):
            raise UserError(f"tracking.trackers.wandb.mode={self.mode}", "must be online or offline", offline)
        if self.mode == "online" and not _has_login():
            raise UserError("tracking=wandb", "there is no login: neither WANDB_API_KEY nor `wandb login`", offline)

    def prepare(self) -> None:
        """Import wandb."""
        import wandb  # noqa: F401

    def where(self) -> str:
        """Return the run's address, or the command that sends what is kept."""
        if self.url:
            return self.url
        if self.mode == "offline":
            return f"wandb sync {quoted(str(self.run_dir / 'wandb'))}/offline-run-*"
        return f"{os.environ.get('WANDB_BASE_URL', SERVER).replace('//api.', '//')}"

    def start(self, run: TrackedRun, before: str | None) -> str:
        """Open the run, or go on with it."""
        import wandb

        known = before or run.opened[:16]
        if self.run is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.run = wandb.init(
                id=known,
                resume="allow",
                project=self.project or run.experiment,
                entity=self.entity,
                name=run.name,
                group=Path(run.parent).name if run.parent else None,
                config=dict(run.params),
                tags=[f"{key}={value}"[:64] for key, value in run.tags.items() if _short(key, value)],
                reinit="create_new",
                settings=_settings(wandb, self.mode, self.run_dir),
            )
            self.run.define_metric("*", step_metric="update")
            self.url = "" if self.mode == "offline" else str(self.run.url or "")
        return known

    def log(self, points: Sequence[Point]) -> None:
        """Send points, those of one line of metrics.jsonl together."""
        rows: dict[tuple[int, int], list[dict[str, float]]] = {}
        for point in points:
            places = rows.setdefault((point.time, point.step), [{}])
            if point.name in places[-1]:
                places.append({})
            places[-1][point.name] = point.value
        for (_, step), values in rows.items():
            for one in values:
                self.run.log({**one, "update": step})

    def artifact(self, path: Path) -> None:
        """Send a file."""
        self.run.save(str(path), base_path=str(path.parent), policy="now")

    def finish(self, status: str, tags: Mapping[str, str]) -> None:
        """End the run; wandb waits for what is not sent yet."""
        if self.run is not None:
            self.run.summary.update({key: value for key, value in tags.items() if "note" not in key})
            self.run.finish(exit_code=STATUS[status])
            self.run = None

    def leave_open(self, tags: Mapping[str, str]) -> None:
        """End the run without a fault: wandb has no open run without a process. A later command goes on with it."""
        self.finish("FINISHED", tags)

    def close(self) -> None:
        """Let go of a run that could not be ended, so that its id can be used again."""
        self.finish("KILLED", {})


def _short(key: str, value: str) -> bool:
    """Whether a tag is one of those few words by which wandb's list of runs is searched."""
    return key in ("trainer.recipe", "trainer.strategy", "trainer.device", "trainer.precision") and bool(value)


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL", SERVER).partition("://")[2].partition("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(server) is not None
    return False


def _settings(wandb: Any, mode: str, run_dir: Path) -> Any:
    return wandb.Settings(
        mode=mode,
        root_dir=str(run_dir),
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
    )
