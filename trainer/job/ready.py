"""A job that has passed every check, before anything is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import store
from trainer.config import redact
from trainer.config.instantiate import for_saved_weights
from trainer.config.redact import values
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import RunFailed, UserError
from trainer.host import machine_limits
from trainer.host.folder_checks import LEAST, check_folder
from trainer.host.quiet_torch import import_quietly
from trainer.job.result import tested_before
from trainer.planning.auto import Machine, ModelFacts
from trainer.planning.batches import FIRST_TRY, single_sample
from trainer.planning.checked_config import Checked
from trainer.planning.class_names import of_checkpoint
from trainer.planning.find_checkpoint import FRESH, find_checkpoint
from trainer.planning.launcher import Assignment
from trainer.planning.make_plan import make_plan
from trainer.planning.plan import Paths, Plan
from trainer.planning.resume import Resume, as_begun, fit, other_classes, with_classes
from trainer.planning.training_checks import check_denominator
from trainer.planning.validate import check
from trainer.run_folder.leftovers import check_reads
from trainer.tracking import trackers

WEIGHTS_KEPT = 2
"""Times that a run's folder holds the weights: the last and the best."""


@dataclass(frozen=True)
class Place:
    """The folder that the user has named for a run, or for all jobs of a sweep, and the key for it."""

    key: str
    folder: Path


@dataclass(frozen=True)
class Command:
    """What the user asks for: a composed config with the keys that were typed, and the run's folder (``paths``).

    A job is planned from it, and planned again from a changed one: for another batch size, or for other hosts.

    Attributes:
        place: the folder that the user has named, which may hold that of the run. away: it is for other machines.
    """

    config: Mapping[str, Any]
    typed: tuple[str, ...]
    paths: Paths
    place: Place
    away: bool = False

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
        return replace(self, config={**self.config, **changes})


@dataclass(frozen=True)
class Ready:
    """A job that has passed every check: its checked config, its model's facts, and its plan.

    Attributes:
        command: the job is planned from it. imported: packages that the checks have imported: the processes need most
        of them. swept: keys of which the sweep takes several values. later: the job is not the first of its sweep: few
        words describe it. resume: the checkpoint from which it resumes; None: it begins. tested: what the run had
        measured of the test data before it is resumed, see :class:`Assignment`. digest: the fingerprint of its data,
        which then are prepared; empty: not computed. counted: the labels of its training data are counted, where they
        have to be.
    """

    command: Command
    checked: Checked
    model: ModelFacts
    plan: Plan
    imported: tuple[str, ...] = ()
    swept: frozenset[str] = frozenset()
    later: bool = False
    resume: Resume | None = None
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
            str(self.resume.folder) if self.resume is not None else "",
            data=self.digest if checked.source.knows_its_data else "",
            tested=self.tested,
        )

    @property
    def secrets(self) -> set[str]:
        """The job's secret values: those in the config, and others that this process knows."""
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
        checked = replace(self.checked, facts=facts)
        plan = make_plan(checked, self.model, Machine.here(), self.command.paths).changed(
            remarks={"left_out": self.plan.remarks.left_out}, batches={"lease_batches": self.plan.batches.lease_batches}
        )
        return replace(self, checked=checked, plan=plan, counted=False)

    def with_batch_size(self, size: int) -> Ready:
        """This job planned again with a batch size per worker, where ``data.batch_size=auto`` is asked for."""
        return self._again(self.command.with_batch_size(size))

    def on_hosts(self, hosts: int, number: int, port: int) -> Ready:
        """This job planned again for that many hosts, see :meth:`Command.on_hosts`."""
        return self._again(self.command.on_hosts(hosts, number, port, self.plan))

    def _again(self, command: Command) -> Ready:
        fresh = _planned(command).with_plan(remarks={"left_out": self.plan.remarks.left_out})
        return replace(fresh, imported=self.imported, swept=self.swept, later=self.later)


def get_ready(
    config: Mapping[str, Any],
    typed: Sequence[str],
    run_dir: str,
    place: str = "hydra.run.dir",
    passed: Callable[[Checked], None] = lambda checked: None,
    above: Path | None = None,
    whole: bool = False,
    away: bool = False,
) -> Ready:
    """Check a config wholly and plan the job; writes nothing, except that it may fetch a checkpoint.

    Args:
        place: the key that names ``run_dir``, or the folder ``above`` of the sweep that the job belongs to.
        whole: the user named the folder by its whole path.
        away: the job is for other machines than this one.
        passed: called when the light checks are passed, before torch is imported.

    Raises:
        UserError: the job cannot run.
    """
    redact.HERE.learn(values(config))
    try:
        paths = Paths(run_dir, whole_path=whole, started_in=os.getcwd())
        return _get_ready(Command(config, tuple(typed), paths, Place(place, above or Path(run_dir)), away), passed)
    except OSError as error:  # whatever is read here, the config names
        if limit := machine_limits.reached(error):
            raise RunFailed(limit) from error
        raise UserError(str(error.filename or "the config"), f"cannot be read: {error.strerror or error}") from error


def _get_ready(command: Command, passed: Callable[[Checked], None]) -> Ready:
    before = frozenset(sys.modules)
    ready = _planned(command, passed)
    from trainer.job.balanced_weights import weighed
    from trainer.launch.preload import imported_since

    ready = replace(ready, imported=tuple(imported_since(before)))
    checked, resume = ready.checked, None
    with checked.lacks:
        folder = _checkpoint(checked.config, ready.plan)
        if folder is not None and checked.searches:
            ready = _as_in_checkpoint(ready, folder)
        resume = None if folder is None else _of_these_classes(ready, folder)
    ready = weighed(ready, early=True)
    lacks = list(dict.fromkeys([*ready.checked.lacks, *checked.lacks]))
    ready = replace(ready, plan=as_begun(ready.plan, resume), resume=resume, tested=tested_before(resume))
    return ready.with_plan(remarks={"lacks": lacks})


def _of_these_classes(ready: Ready, folder: Path) -> Resume:
    """The :class:`Resume` from a checkpoint that fits the job.

    Raises:
        UserError: it does not fit, or is of other classes.
    """
    from trainer.worker.carried_over import begins_anew

    checked = ready.checked
    other = of_checkpoint(folder.parent.parent, checked.config, checked.source, checked.facts)
    try:
        anew = partial(begins_anew, ready.plan, ready.model, folder)
        resume = fit(checked.config, ready.plan, folder, anew)
    except UserError:  # of other classes so much differs, their number above all, that they are what is to be said
        if other and not checked.config.resume.allow_changes:
            raise other_classes(other, folder) from None
        raise
    return with_classes(resume, other, checked.config.resume.allow_changes)


def _as_in_checkpoint(ready: Ready, folder: Path) -> Ready:
    """The job with its checkpoint's batch size, in place of a search for ``data.batch_size=auto``."""
    data = store.about(folder).config.get("data", {})
    ready = ready.with_batch_size(int(data.get("batch_size", 0)) or FIRST_TRY)
    return ready.with_plan(remarks={"why": {**ready.plan.remarks.why, "batch_size": f"as in {folder.name}"}})


def _planned(command: Command, passed: Callable[[Checked], None] = lambda checked: None) -> Ready:
    """The job with its plan, whether or not it goes on from somewhere."""
    checked, place = check(command.config, command.typed, command.away), command.place
    with checked.lacks:
        if not checked.elsewhere:
            check_reads(checked.config.plain(), place.folder, place.key)
    with checked.lacks:
        if not checked.config.launch.node_rank:
            trackers.check(checked.config.tracking, Path(command.paths.run_dir))
    passed(checked)
    if checked.config.launch.nnodes > 1:
        import_quietly()
    from trainer.worker.probe import probe  # imports torch: only what has passed the light checks waits for that

    if checked.config.mode != "train":
        plain = for_saved_weights(checked.config.model)
        checked = replace(checked, config=checked.config.replaced("model", plain))
    model = probe(checked.config, checked.facts, checked.declaration, single_sample(checked))
    if checked.config.mode != "train":
        model = replace(model, part=_check_weights(checked.config))
    with checked.lacks:
        check_denominator(checked, model)
    _check_places(checked, model, place)
    return Ready(command, checked, model, make_plan(checked, model, Machine.here(), command.paths))


def _checkpoint(config: RunConfig, plan: Plan) -> Path | None:
    """Find the checkpoint from which a job resumes; None if it starts anew.

    Raises:
        UserError: it cannot.
    """
    from trainer.job.claim_folder import wait_for_the_life_before
    from trainer.terminal.screen import Screen

    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:  # of a damaged checkpoint, where copies are looked for as well
            Screen().print(line, soft_wrap=True)
        said.add(line)

    run_dir = Path(plan.paths.run_dir)
    if plan.topology.least_nnodes and plan.topology.node_rank:
        return None  # host 0 tells it, when the hosts have met
    goes_on = config.resume.path not in (None, FRESH)
    if goes_on and not (config.plan or plan.topology.node_rank):
        wait_for_the_life_before(run_dir, say)

    def folder_of(run_id: str) -> Path:
        from trainer.tracking import run_lookup

        return run_lookup.folder_of(config.tracking, run_id)

    if config.checkpoint.to is None and "://" not in (config.resume.path or ""):
        return find_checkpoint(config, run_dir, say, folder_of)
    from trainer.job.fetch_checkpoints import check_copies, fetched

    config = fetched(config, plan, say)
    folder = find_checkpoint(config, run_dir, say, folder_of)
    check_copies(config, plan, folder)
    return folder


def _check_places(checked: Checked, model: ModelFacts, place: Place) -> None:
    """Refuse a job whose run folder or ``predict.output`` cannot be written, or has too little room.

    Raises:
        UserError: it cannot; of a plan it is listed.
    """
    here, output = not checked.elsewhere, checked.config.predict.output
    weights = WEIGHTS_KEPT * 4 * model.parameters if checked.config.mode == "train" else 0
    with checked.lacks:
        check_folder(place.folder, place.key, LEAST + weights, here)
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
