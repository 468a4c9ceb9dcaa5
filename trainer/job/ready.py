"""A job that has passed every check, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.config.instantiate import for_saved_weights
from trainer.config.redact import values
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.host import hardware
from trainer.host.folder_checks import LEAST, check_folder
from trainer.planning.auto import Machine, ModelFacts
from trainer.planning.batches import single_sample
from trainer.planning.checked_config import Checked
from trainer.planning.launcher import Assignment
from trainer.planning.make_plan import make_plan
from trainer.planning.plan import Paths, Plan
from trainer.planning.training_checks import check_denominator
from trainer.planning.validate import check
from trainer.run_folder.leftovers import check_reads

WEIGHTS_KEPT = 2
"""Times that a run's folder holds the weights: the last and the best."""


@dataclass(frozen=True)
class NamedFolder:
    """The folder that the user has named for a run, or for all jobs of a sweep, and the key for it."""

    key: str
    folder: Path


@dataclass(frozen=True)
class Command:
    """A command: its composed config, the keys that were typed, and the run's folder (``paths``).

    A job is planned from its command, and planned again from a changed one: for another batch size, or for other hosts.

    Attributes:
        place: the folder that the user has named: the run's, or the one of its sweep. away: it is for other machines.
        checked: what the light checks have found out; None: they come first.
    """

    config: Mapping[str, Any]
    typed: tuple[str, ...]
    paths: Paths
    place: NamedFolder
    away: bool = False
    checked: Checked | None = None

    def with_batch_size(self, size: int) -> Command:
        """This command with a batch size per worker in place of ``data.batch_size=auto``."""
        return self._changed(data={"batch_size": size})

    def on_hosts(self, hosts: int, number: int, port: int, plan: Plan) -> Command:
        """This command for ``hosts`` hosts, of which this one is ``number``, and with the port of their meeting.

        The samples of an update stay as in ``plan``, where all workers step together; else each worker keeps its batch.
        """
        sizes = {"batch_size": None, "global_batch_size": plan.batches.global_size}
        if not plan.strategy.traits.lockstep:
            sizes = {"batch_size": plan.batches.size, "global_batch_size": None}
        launch = {"nnodes": hosts, "node_rank": number, "master_port": port, "least_nnodes": 1}
        return self._changed(launch=launch, data=sizes)

    def _changed(self, **groups: Mapping[str, Any]) -> Command:
        changes = {name: {**self.config.get(name, {}), **values} for name, values in groups.items()}
        return replace(self, config={**self.config, **changes}, checked=None)


@dataclass(frozen=True)
class Ready:
    """A job that has passed every check: its checked config, its model's facts, and its plan.

    Attributes:
        command: the job is planned from it. model: facts of the model. imported: packages that the checks have
        imported; the processes need most of them. swept: keys with several values in the sweep. later: the job is not
        the first of its sweep, and is described briefly. digest: fingerprint of its prepared data; empty: not computed.
        tested: see :class:`Assignment`. counted: the labels of its training data are counted, if they have to be.
    """

    command: Command
    checked: Checked
    model: ModelFacts
    plan: Plan
    imported: tuple[str, ...] = ()
    swept: frozenset[str] = frozenset()
    later: bool = False
    digest: str = ""
    tested: tuple[int, dict[str, float]] = (0, {})
    counted: bool = False

    @property
    def assignment(self) -> Assignment:
        """The :class:`Assignment` that this job hands to its processes."""
        checked = self.checked
        return Assignment(
            checked.config,
            self.plan,
            checked.files,
            tuple(sorted(self.secrets)),
            self.imported,
            self.plan.resume.folder if self.plan.resume is not None else "",
            data=self.digest if checked.source.knows_its_data else "",
            tested=self.tested,
        )

    @property
    def secrets(self) -> set[str]:
        """The secret values of the config, and others that this process knows."""
        return values(self.checked.config.plain()) | redact.HERE.values

    def with_plan(self, **changes: Any) -> Ready:
        """This job with other values in its plan, see :meth:`Plan.changed`."""
        return replace(self, plan=self.plan.changed(**changes))

    def in_folder(self, run_dir: Path) -> Ready:
        """This job in another folder, now and when it is planned again."""
        command = replace(self.command, paths=replace(self.command.paths, run_dir=str(run_dir)))
        return replace(self.with_plan(paths={"run_dir": str(run_dir)}), command=command)

    def with_facts(self, facts: Facts) -> Ready:
        """This job planned again for other facts of its data."""
        if facts == self.checked.facts:
            return self
        return replace(self._planned(replace(self.checked, facts=facts), self.model), counted=False)

    def with_model(self, **facts: Any) -> Ready:
        """This job planned again with more known of its model."""
        weights = {"class_weights": self.plan.objective.class_weights}
        return self._planned(self.checked, replace(self.model, **facts)).with_plan(objective=weights)

    def _planned(self, checked: Checked, model: ModelFacts) -> Ready:
        plan = make_plan(checked, model, Machine.here(), self.command.paths).changed(
            remarks={"left_out": self.plan.remarks.left_out},
            batches={"lease_batches": self.plan.batches.lease_batches},
            resume=self.plan.resume,
        )
        return replace(self, checked=checked, model=model, plan=plan)

    def with_batch_size(self, size: int) -> Ready:
        """This job planned again with a batch size per worker, where ``data.batch_size=auto`` is asked for."""
        return self._again(self.command.with_batch_size(size))

    def on_hosts(self, hosts: int, number: int, port: int) -> Ready:
        """This job planned again for that many hosts, see :meth:`Command.on_hosts`."""
        return self._again(self.command.on_hosts(hosts, number, port, self.plan))

    def _again(self, command: Command) -> Ready:
        fresh = plan_job(command).with_plan(remarks={"left_out": self.plan.remarks.left_out})
        fresh = fresh.with_model(speeds=self.model.speeds) if self.model.speeds else fresh
        return replace(fresh, imported=self.imported, swept=self.swept, later=self.later)


def plan_job(command: Command, on_checked: Callable[[Checked], None] = lambda checked: None) -> Ready:
    """Check a command and plan its job, without regard to a checkpoint.

    Args:
        on_checked: called when the light checks are passed, before torch is imported.

    Raises:
        UserError: the job cannot run.
    """
    if not hardware.has_driver() or command.away:
        return _plan_job(command, on_checked)
    from trainer.job.gpu_check import planned_for_usable_gpus

    return planned_for_usable_gpus(partial(_plan_job, command), on_checked)


def _plan_job(command: Command, on_checked: Callable[[Checked], None]) -> Ready:
    """Check and plan for the GPUs that are known now."""
    checked, place = command.checked or check(command.config, command.typed, command.away), command.place
    with checked.lacks:
        if not checked.elsewhere:
            check_reads(checked.config.plain(), place.folder, place.key)
    if checked.config.tracking.trackers and not checked.config.launch.node_rank:
        from trainer.tracking import trackers

        with checked.lacks:
            trackers.check(checked.config.tracking, Path(command.paths.run_dir))
    on_checked(checked)
    if checked.config.launch.nnodes > 1:
        from trainer.host.quiet_torch import import_quietly

        import_quietly()
    from trainer.worker.probe import probe  # imports torch: only what has passed the light checks waits for that

    if checked.config.mode != "train":
        plain = for_saved_weights(checked.config.model)
        checked = replace(checked, config=checked.config.replaced("model", plain))
    model = probe(checked.config, checked.facts, checked.declaration, single_sample(checked), checked.device)
    if checked.device == "cuda":
        from trainer.worker.speeds import with_speeds

        model = with_speeds(model, checked)
    if checked.config.mode != "train":
        model = replace(model, part=_check_weights(checked.config))
    with checked.lacks:
        check_denominator(checked, model)
    _check_places(checked, model, place, command.away)
    return Ready(command, checked, model, make_plan(checked, model, Machine.here(), command.paths))


def _check_places(checked: Checked, model: ModelFacts, place: NamedFolder, away: bool) -> None:
    """Refuse a run folder or ``predict.output`` that cannot be written, or has too little room.

    Args:
        away: the job is submitted from here, which writes into its folder; without a shared disk no weights come here.
    """
    here, output = not checked.elsewhere, checked.config.predict.output
    apart = away and not checked.config.node("launch").get("shared_storage", True)
    weights = WEIGHTS_KEPT * 4 * model.parameters if checked.config.mode == "train" and not apart else 0
    with checked.lacks:
        check_folder(place.folder, place.key, LEAST + weights, here or away)
    with checked.lacks:
        if output is not None:
            check_folder(Path(output).parent, "predict.output", LEAST, here)


def _check_weights(config: RunConfig) -> str:
    """The weights fit the model; returns which part of their file is taken.

    Raises:
        UserError: they do not.
    """
    from trainer.weights import fit
    from trainer.worker.probe import meta_model

    return fit.check(Path(str(config.weights)), meta_model(config), str(config.model["_target_"]))
