"""``sweep=optuna``: a search, of which Optuna chooses each job's values from the results so far (ask and tell).

The study is a file in the sweep's folder, or at ``sweep.storage``. A trial has the number of its job::

    asked (RUNNING) --> its job is done       COMPLETE
                    --> others are better     PRUNED     (with pruner=asha: waits at its rung, and may go on)
                    --> its job has failed    FAIL       (of a process that died: started again, ``sweep.retries``)

A trial that is RUNNING where no command is at work was interrupted: the next command goes on with it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import sweep_space
from trainer.cli.sweep_objective import Followed, Objective, measured, points
from trainer.cli.sweep_parallel import Source
from trainer.cli.sweep_rungs import Rungs
from trainer.cli.sweep_space import Choice, Dimension
from trainer.cli.sweep_state import Next
from trainer.config.redact import text
from trainer.config.schema.run import SweepConfig
from trainer.errors import PRUNED, UserError
from trainer.job.result import Result, read_result
from trainer.terminal.screen import say

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

FILE = "study.log"
RESUME = "resume.path=auto"
SEEDS = 2**32


def check(config: SweepConfig, space: Sequence[Dimension], objectives: int) -> None:
    """Refuse a search that cannot be.

    Raises:
        UserError: a package is missing, or sampler, pruner, space and objectives do not go together.
    """
    for package in ("optuna", *(["cmaes"] if config.sampler == "cmaes" else [])):
        if importlib.util.find_spec(package) is None:
            how = "pip install 'trainer[search]' (in a checkout: '.[search]')"
            raise UserError("sweep=optuna", f"the package {package} is not installed here", how)
    if config.sampler == "grid":
        sweep_space.grid(space)
    if config.sampler == "cmaes":
        if choice := next((one.key for one in space if isinstance(one, Choice)), None):
            why = f"searches ranges of numbers, and {choice} has a list of values"
            raise UserError("sweep.sampler=cmaes", why, "sweep.sampler=tpe")
        if len(space) < 2 or objectives > 1:
            why = "searches two keys or more, for one objective"
            raise UserError("sweep.sampler=cmaes", why, "sweep.sampler=tpe")
    if config.pruner and objectives > 1:
        why = f"compares jobs by one metric, and sweep.objective has {objectives}"
        raise UserError(f"sweep.pruner={config.pruner}", why, "sweep.pruner=null")


class Search(Source):
    """The trials of a study as jobs of a sweep.

    Args:
        base: the overrides that all jobs have. folder: of the sweep. epochs: of a job.
    """

    def __init__(
        self,
        config: SweepConfig,
        space: Sequence[Dimension],
        objectives: Sequence[Objective],
        base: Sequence[str],
        folder: Path,
        epochs: int,
    ) -> None:
        self.config, self.space, self.objectives = config, space, tuple(objectives)
        self.base, self.folder = tuple(base), folder
        self.grid = sweep_space.grid(space) if config.sampler == "grid" else []
        self.total = len(self.grid) if self.grid else config.trials
        self.study, self.distributions = self._study(), {one.key: _distribution(one) for one in space}
        self.trials: dict[int, Trial] = {}
        self.again: list[int] = []
        self.deaths: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.followed: dict[int, Followed] = {}
        self.running: set[int] = set()
        self.rungs: Rungs | None = None
        if config.pruner == "asha":
            self.rungs = Rungs(self.objectives[0], config.rung, config.reduction, epochs)

    def _study(self) -> Study:
        """Open the study, or make it.

        Raises:
            UserError: its storage cannot be used, or it is of another space.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        storage = self.config.storage
        try:
            study = optuna.create_study(
                storage=storage or JournalStorage(JournalFileBackend(str(self.folder / FILE))),
                study_name=str(self.folder.absolute()),
                directions=["minimize" if one.is_less_better else "maximize" for one in self.objectives],
                pruner=self._pruner(),
                load_if_exists=True,
            )
        except Exception as error:
            if storage is None:
                raise
            why = f"cannot be used: {text(str(error).splitlines()[0] if str(error) else type(error).__name__)}"
            raise UserError("sweep.storage", why, "sweep.storage=sqlite:///FILE") from error
        is_of = {"space": "; ".join(f"{one.key} {one}" for one in self.space), "objectives": str(self.objectives)}
        for name, value in is_of.items():
            if study.user_attrs.get(name, value) != value:
                why = f"holds a search of other {name}"
                raise UserError(f"hydra.sweep.dir={self.folder}", why, "another hydra.sweep.dir")
            study.set_user_attr(name, value)
        return study

    def _pruner(self) -> Any:
        from optuna import pruners

        if self.config.pruner == "median":
            return pruners.MedianPruner()
        if self.config.pruner == "halving":
            return pruners.SuccessiveHalvingPruner(self.config.rung, self.config.reduction)
        return pruners.NopPruner()

    def _sampler(self, number: int) -> Any:
        """A sampler for one trial: its seed is of the trial, so that a search that goes on chooses what it would have
        chosen in one go."""
        from optuna import samplers

        seed = (self.config.seed * 1_000_003 + number) % SEEDS
        if self.config.sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return samplers.TPESampler(seed=seed) if self.config.sampler == "tpe" else samplers.RandomSampler(seed=seed)

    def before(self) -> list[tuple[Next, Result | None]]:
        """The trials of earlier commands, in their order, each with its result; None: it is not over."""
        from optuna import trial

        found: list[tuple[Next, Result | None]] = []
        for one in self.study.get_trials(deepcopy=False):
            job = self._job(one.number, one.params)
            folder = self.folder / job.subdir
            result = read_result(str(folder), "failed", "")
            if one.state.is_finished():
                found.append((job, result))
                continue
            found.append((job, None))
            self.trials[one.number] = trial.Trial(self.study, one._trial_id)
            if self.rungs is not None and result.status == PRUNED:
                self.rungs.reaches(one.number, points(folder, self.objectives[0].metric))
                self.rungs.waits(one.number)
            else:
                self.again.append(one.number)
        return found

    def next(self) -> Next | None:
        job = self._next()
        if job is not None:
            self.running.add(job.number)
        return job

    def _next(self) -> Next | None:
        if self.again:
            return self._of(self.again.pop(0))
        number = len(self.study.get_trials(deepcopy=False))
        all_started = number >= self.total
        if self.rungs is not None and (best := self.rungs.promoted(all_started and not self.running)) is not None:
            return self._of(best)
        if all_started:
            return None
        if self.grid:
            self.study.enqueue_trial(self.grid[number])
        self.study.sampler = self._sampler(number)
        asked = self.study.ask(self.distributions)
        self.trials[asked.number] = asked
        return self._of(asked.number)

    def _of(self, number: int) -> Next:
        return self._job(number, self.trials[number].params)

    def _job(self, number: int, values: dict[str, Any]) -> Next:
        own = tuple(sweep_space.words(values))
        subdir = str(number)
        begun = (self.folder / subdir / "config.yaml").exists() and RESUME not in self.base
        return Next(number, (*self.base, *own, *([RESUME] if begun else [])), tuple(map(text, own)), subdir)

    def is_enough(self, number: int, folder: Path) -> bool:
        if self.config.pruner is None or (number in self.deaths and not folder.exists()):
            return False
        found = self.followed.setdefault(number, Followed(folder, self.objectives[0].metric)).points()
        if self.rungs is not None:
            for epochs, value in self.rungs.reaches(number, found):
                self.trials[number].report(value, epochs)
            return self.rungs.is_to_wait(number)
        seen = self.seen.get(number, 0)
        for step, (_, value) in enumerate(found[seen:], seen + 1):
            self.trials[number].report(value, step)
        self.seen[number] = max(seen, len(found))
        return len(found) > seen and self.trials[number].should_prune()

    def ended(self, number: int, result: Result, folder: Path, died: bool) -> bool:
        from optuna.trial import TrialState

        self.running.discard(number)
        self.followed.pop(number, None)
        if died and result.status != "done" and self.deaths.get(number, 0) < self.config.retries:
            self.deaths[number] = self.deaths.get(number, 0) + 1
            self.again.append(number)
            return False
        if result.status == PRUNED and self.rungs is not None:
            self.rungs.waits(number)
            return False
        if result.status == "done":
            values = measured(folder, self.objectives)
            if missing := [one.metric for one in self.objectives if one.metric not in values]:
                say(f"job {number} has not measured {', '.join(missing)}, which is the objective of the search")
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self.study.tell(number, [values[one.metric] for one in self.objectives])
        elif result.status == PRUNED:
            self.study.tell(number, state=TrialState.PRUNED)
        elif result.status == "failed":
            self.study.tell(number, state=TrialState.FAIL)
        return True

    def left_behind(self) -> list[Next]:
        from optuna.trial import TrialState

        if self.rungs is None or self.running:
            return []
        for number in self.rungs.waiting:
            self.study.tell(number, state=TrialState.PRUNED)
        return self.paused()

    def paused(self) -> list[Next]:
        return [] if self.rungs is None else [self._of(number) for number in sorted(self.rungs.waiting)]


def _distribution(one: Dimension) -> BaseDistribution:
    from optuna import distributions

    if isinstance(one, Choice):
        return distributions.CategoricalDistribution(one.values)
    if one.whole:
        return distributions.IntDistribution(int(one.low), int(one.high), log=one.log, step=int(one.step or 1))
    return distributions.FloatDistribution(one.low, one.high, log=one.log, step=one.step)
