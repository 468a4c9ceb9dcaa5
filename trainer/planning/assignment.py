"""The assignment: what each process of the run gets (the finished config, the plan, and more)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.run_config import RunConfig
from trainer.data.batch_reordering import Rewind
from trainer.host.notes_board import Board
from trainer.planning.deaths import Deaths
from trainer.planning.plan import Plan


@dataclass(frozen=True)
class Assignment:
    """What a process of the run is started with; the same for all processes.

    Attributes:
        files: of mode=predict, what it looks at, relative to predict.input. secrets: what is never printed. imported:
        packages that the launcher has imported while it checked the config. resume: folder of the checkpoint that the
        run goes on from; empty: it begins. rewinds: since that checkpoint, how the batches come in another order
        (:mod:`trainer.data.batch_reordering`). deaths: counts those of the run for the launcher, which starts single
        processes again as long as it allows that; None: it does
            not. No process gets it.
        watch: called by the launcher now and then, while the processes run with the board of the run; no process gets
        it. data: the fingerprint of the data, for checkpoints; empty: there is none, or host 0 has it. tested: the
        update after which the life before ended, and what it measured of the test data then; empty: it did not. again:
        these are not the first processes of this job: others have died.
    """

    config: RunConfig
    plan: Plan
    files: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    resume: str = ""
    rewinds: tuple[Rewind, ...] = ()
    data: str = ""
    tested: tuple[int, dict[str, float]] = (0, {})
    again: bool = False
    deaths: Deaths | None = None
    watch: Callable[[Board | None], None] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the run had a life before, whose logs are appended to."""
        return self.again or bool(self.resume)

    def as_dict(self) -> dict[str, Any]:
        """Return this assignment as plain data for JSON."""
        return {
            "config": self.config.plain(),
            "plan": self.plan.as_dict(),
            "files": self.files,
            "secrets": self.secrets,
            "imported": self.imported,
            "resume": self.resume,
            "rewinds": self.rewinds,
            "data": self.data,
            "tested": self.tested,
            "again": self.again,
        }

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Assignment:
        """Make an assignment of what :meth:`as_dict` returned, after JSON."""
        lists: dict[str, Any] = {name: tuple(plain[name]) for name in ("files", "secrets", "imported")}
        step, tested = plain.get("tested", (0, {}))
        return Assignment(
            RunConfig.of(plain["config"]),
            Plan.of(plain["plan"]),
            **lists,
            resume=plain["resume"],
            rewinds=tuple(Rewind(*rewind) for rewind in plain.get("rewinds", ())),
            data=str(plain.get("data", "")),
            tested=(step, tested),
            again=bool(plain.get("again", False)),
        )
