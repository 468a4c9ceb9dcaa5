"""The contract of trackers: what sends a run's points to one service, such as MLflow or TensorBoard.

The recorder process (``recorder.py``) follows the run folder's ``metrics.jsonl`` and hands its points to each tracker,
in order, in a thread of the tracker's own. A method that raises is called again later, with the same arguments, so each
of them must allow that it is repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

STILL_RUNNING = "RUNNING"
"""Status of a run that ends with another command than the one that opened it."""


class Point(NamedTuple):
    """One value of a metric: after which update, and when (ms since 1970)."""

    name: str
    value: float
    step: int
    time: int


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers, without secrets but for ``trackers`` and ``mlflow``.

    Attributes:
        folder: of the run. name: a few words. experiment: the group of runs that it belongs to.
        opened: a text that no other run has; a resumed run keeps it. start_time: ms since 1970.
        params: all resolved keys. tags, dataset: further facts. artifacts: patterns of files in the folder to send.
        parent: the folder of the sweep that the run belongs to. parent_id: that sweep's id, of the same tracker.
        resumed: the run goes on in this folder. before: the description of the life before it.
        copied: of a copied folder, for each tracker the id of the original's run.
        trackers: for each tracker its ``_target_`` and keys. mlflow: what only MLflow has, such as the registry.
    """

    folder: str
    name: str = ""
    experiment: str = ""
    opened: str = ""
    start_time: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    dataset: Mapping[str, str] | None = None
    artifacts: Sequence[str] = ()
    parent: str | None = None
    parent_id: str | None = None
    resumed: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    trackers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mlflow: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> TrackedRun:
        """Make a TrackedRun of a mapping read from JSON."""
        return TrackedRun(**{one.name: plain[one.name] for one in fields(TrackedRun) if one.name in plain})


class Tracker(ABC):
    """Sends one run to one service. The constructor is cheap and contacts nobody: it is called for the plan, too.

    Attributes:
        title: the service's name on the screen.
        trouble: what the screen says while a method fails, before the error.
        say: shows a line to the user.
        group: the id of the group of runs that the run belongs to, such as MLflow's experiment; once it is open.
    """

    title = group = ""
    trouble = "points cannot be sent"

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.say: Callable[[str], None] = lambda line: None

    def check(self) -> None:
        """Check before the start that the tracker can work here, such as that its package is installed.

        Raises:
            UserError: the tracker can never work.
        """

    def prepare(self) -> None:
        """Import what the tracker needs; called while the launcher imports torch."""

    @abstractmethod
    def where(self) -> str:
        """Return the place to which the tracker writes, and the command that shows it.

        The plan shows it, and the run's last lines what it says after the run.
        """

    @abstractmethod
    def start(self, run: TrackedRun, before: str | None) -> str:
        """Open the run at the service.

        Args:
            before: the id that this run had before it was resumed; None: the run is new.

        Returns:
            The run's id there. Another id than ``before`` makes the recorder send all points from the first one.
        """

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Send these points; return when the service has them."""

    def sent(self, name: str) -> Iterable[int]:
        """Return the updates of all points of that metric that the service has, each as often as the service has it.

        Called after a failure or a resume, so that no point is sent twice. A tracker without this method is spared the
        points that :meth:`log` has taken; should the recorder be killed in ``log``, that batch is sent again.
        """
        raise NotImplementedError

    def artifact(self, path: Path) -> None:
        """Send a file of the run's folder; called at the end."""

    def trained(self) -> None:
        """Begin what needs the trained model: the run is done, and the parent still draws its pictures."""

    def finish(self, status: str, tags: Mapping[str, str]) -> None:
        """End the run at the service: ``FINISHED``, ``FAILED`` or ``KILLED``, with last tags."""

    def leave_open(self, tags: Mapping[str, str]) -> None:
        """Send last tags of a run that a later command goes on with; it is not to end at the service."""

    def close(self) -> None:
        """Free what the tracker holds. Called once, at the end."""
