"""A sweep whose jobs a search chooses: its checks before the first one, and its jobs as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import sweep_search, sweep_space
from trainer.cli.submitters import submitter_of
from trainer.cli.sweep_parallel import Parallel, of_host
from trainer.cli.sweep_points import BY_NUMBER, check_points
from trainer.cli.sweep_run import Sweep
from trainer.cli.sweep_search import Search
from trainer.cli.sweep_state import Next
from trainer.config.keys import key_of
from trainer.errors import UserError
from trainer.host.symlink_checks import check_sweep_folder
from trainer.planning.find_checkpoint import AUTO

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.cli.sweep_space import Dimension

NUMBERED = "${hydra.job.num}"
"""How Hydra names the jobs' folders by default."""


def checked(
    app: Hydra, master: DictConfig, overrides: list[str], flags: Sequence[str], folder: Path, config_name: str
) -> Sweep:
    """Check a search by the two corners of its space: all smallest and first values, and all largest and last ones.

    Raises:
        UserError: it cannot run, or the folder has an earlier search that this command does not go on with.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    if submitter_of(master) is not None:
        why = "a search starts its jobs itself, on this host"
        raise UserError("sweep=optuna", why, "launch=local sweep.parallel=auto")
    named: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    if named.get("subdir") != NUMBERED:
        raise UserError("hydra.sweep.subdir", "the jobs of a search have their numbers as folders", BY_NUMBER)
    typed: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides(typed)
    space_of: Any = OmegaConf.to_container(master.sweep, resolve=True)
    space = sweep_space.of_search(space_of.get("space") or {}, parsed)
    swept = {one.key for one in space}
    base = [
        str(one.input_line)
        for one in parsed
        if not one.is_sweep_override() and key_of(str(one.input_line)) not in swept
    ]
    corners = [[*base, *sweep_space.words({one.key: one.ends[n] for one in space})] for n in (0, 1)]
    points = check_points(app, master, corners if corners[0] != corners[1] else corners[:1], as_new=True)
    check_sweep_folder(folder, [folder / point.subdir for point in points], master.hydra.output_subdir)
    goes_on = master.resume.path == AUTO
    sweep = SearchSweep(
        master,
        overrides,
        flags,
        folder,
        [],
        points,
        swept,
        config_name=config_name,
        space=[f"{one.key}={one}" for one in space],
        base=base,
        dimensions=space,
        resumes=goes_on,
    )
    sweep_search.check(sweep.config, space, len(sweep.objectives))
    if (folder / sweep_search.FILE).exists() and not goes_on and not master.get("plan"):
        why = "holds a search, with the results of its jobs"
        raise UserError(f"hydra.sweep.dir={folder}", why, "sweep.resume=true to go on, or another hydra.sweep.dir")
    return sweep


@dataclass
class SearchSweep(Sweep):
    """A sweep whose jobs are trials of a study. ``points`` are the corners of its space, which were checked.

    Attributes:
        base: the overrides of all jobs. dimensions: the space. resumes: this command goes on with an earlier one.
    """

    base: list[str] = field(default_factory=list)
    dimensions: list[Dimension] = field(default_factory=list)
    resumes: bool = False

    @property
    def runs_beside(self) -> bool:
        return True

    @property
    def goes_on(self) -> bool:
        return self.resumes

    @property
    def subdirs(self) -> list[str]:
        return [str(number) for number in range(len(self.jobs))]

    def begins(self, job: Next) -> None:
        """Note the values of a new job."""
        if job.number >= len(self.jobs):
            self.jobs.append(list(job.shown))

    def run_parallel(self) -> None:
        """Run the trials that are not over, and those that the study asks for."""
        config = self.points[0].ready.checked.config
        base = [word for word in self.base if not word.startswith("sweep.")]
        search = Search(self.config, self.dimensions, self.objectives, base, self.folder, config.epochs)
        for job, result in search.before():
            self.begins(job)
            if result is not None:
                self.ended[job.number] = self.row(job.shown, result)
        Parallel(self, search, of_host(self, self.at_a_time or 1 if self.config.parallel != "auto" else None)).run()
