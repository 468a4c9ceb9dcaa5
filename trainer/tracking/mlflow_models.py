"""Packs, sends and registers the trained models of a run in MLflow; a model that fails does not fail the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.tracking import registry
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import said


class RunModels:
    """The models of one run: the best and the last, each packed once, sent once and registered once.

    Args:
        say: shows a line to the user.
    """

    def __init__(self, run: TrackedRun, client: Any, say: Callable[[str], None]) -> None:
        self.run, self.client, self.say = run, client, say
        self.packed: dict[str, Path] = {}
        self.done: set[str] = set()
        self.sent: dict[str, str] = {}
        self.measured: dict[str, dict[str, float]] = {}

    def pack(self) -> dict[str, Any]:
        """Pack the models that are not packed yet; returns which file each model is of."""
        from trainer.tracking import logged_model
        from trainer.weights import tensor_files

        folder = Path(self.run.folder)
        names = self.run.mlflow.get("models", {})
        choices = {which: logged_model.chosen(folder, which, name) for which, name in names.items()}
        for which, choice in choices.items():
            if which in self.done or which in self.packed or choice is None:
                continue
            try:
                if tables := tensor_files.left_out(choice.weights):
                    where = "checkpoints/persistables has its rows (strategy.export_limit)"
                    self.say(f"the {which} model is not logged: its file is without {', '.join(tables)}, and {where}")
                    self.done.add(which)
                    continue
                self.packed[which], own = logged_model.pack_model(folder, choice)
                if own:
                    self.say(f"the logged model takes along your {', '.join(own)}")
            except Exception as error:  # what a user's own model raises where it is loaded by MLflow
                self.say(f"the {which} model was not logged: {type(error).__name__}: {said(error)}")
                self.done.add(which)
        return choices

    def send(self, run_id: str) -> None:
        """Send the packed models, and register them; can be repeated."""
        from trainer.tracking import logged_model

        choices = self.pack()
        for which, folder in self.packed.items():
            if which not in self.done:
                self.sent[which] = logged_model.send(self.client, run_id, choices[which], folder)
                self.measured[which] = choices[which].metrics
                self.done.add(which)
        self.register(run_id)

    def register(self, run_id: str) -> None:
        """Make versions of the registered model; a registry that refuses is shown and fails nothing."""
        name = self.run.mlflow.get("registered_model")
        if not name or not self.sent:
            return
        try:
            self.say(registry.register(self.client, name, run_id, self.run.start_time, self.sent, self.measured))
        except Exception as error:
            if not registry.is_final(error):
                raise
            self.say(f"{name} got no version in the registry ({said(error)}); the models are logged in the run")
        self.sent = {}

    def forget(self) -> None:
        """Remove the packed models."""
        if self.packed:
            from trainer.tracking import logged_model

            for folder in self.packed.values():
                logged_model.forget(folder)
        self.packed = {}
