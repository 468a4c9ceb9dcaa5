"""Strategies, data sources, launchers and models as users write them by mistake."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.data.source import DataSource, Facts, Splits
from trainer.launch.tasks import TaskLauncher
from trainer.strategies.collective import Collective
from trainer.strategies.contract import Declaration, Strategy, Traits


class Good(Declaration):
    """What the mistakes below are made in."""

    worker = "trainer.strategies.collective:Collective"


class NoWorker(Declaration):
    """Has no worker."""


class NoModule(Good):
    worker = "tests.planning.mistaks:Unfinished"


class NoName(Good):
    worker = "tests.planning.mistakes:Unfinishd"


class Dotted(Good):
    worker = "tests.planning.mistakes.Unfinished"


class ClassItself(Good):
    worker = Collective  # type: ignore[assignment]


class NotAWorker(Good):
    worker = "tests.planning.mistakes:Lazy"


class ItsOwnWorker(Good):
    worker = "tests.planning.mistakes:Good"


class UnfinishedWorker(Good):
    worker = "tests.planning.mistakes:Unfinished"


class Unfinished(Strategy):
    """Lacks two methods."""

    def setup(self, model: Any, make_updater: Any) -> Any:
        return model

    def synchronize(self) -> None:
        """Nothing."""


class NoEntry(Good):
    entries = {"server": "tests.planning.mistakes:serve"}


class EntryIsNoFunction(Good):
    entries = {"server": "tests.planning.mistakes:NOTHING"}


NOTHING = None


class TraitsDict(Good):
    traits = {"exact": False}  # type: ignore[assignment]


class TraitsTypo(Good):
    @property
    def traits(self) -> Traits:
        return Traits(same_evrywhere=False)  # type: ignore[call-arg]


class RefusesNone(Good):
    def refuse(self, config: Any, workers: int) -> Any:
        return None


class RefusesText(Good):
    def refuse(self, config: Any, workers: int) -> Any:
        return ["no"]


class RefuseBreaks(Good):
    def refuse(self, config: Any, workers: int) -> Any:
        return config.nothing


class ModelRefusesNone(Good):
    def refuse_model(self, config: Any, model: Any, optimizer: Any) -> Any:
        return None


class OwnInit(Good):
    def __init__(self) -> None:
        pass


class Data(DataSource):
    """What the mistakes below are made in."""

    def facts(self, global_batch_size: int) -> Any:
        return Facts("points", "drawn", 100, 50, (1, 8, 8), classes=10)

    def open(self, facts: Facts) -> Splits:
        raise AssertionError("nothing is opened")


class FactsDict(Data):
    def facts(self, global_batch_size: int) -> Any:
        return {"source": "points"}


class NoClasses(Data):
    def facts(self, global_batch_size: int) -> Any:
        return Facts("points", "drawn", 100, 50, (1, 8, 8))  # type: ignore[call-arg]


class TextFacts(Data):
    def facts(self, global_batch_size: int) -> Any:
        return Facts("points", "drawn", "100", 50, (1, 8, 8), classes=10)  # type: ignore[arg-type]


class ListShape(Data):
    def facts(self, global_batch_size: int) -> Any:
        return Facts("points", "drawn", 100, 50, [1, 8, 8], classes=10)  # type: ignore[arg-type]


class NoOpen(DataSource):
    def facts(self, global_batch_size: int) -> Any:
        return None


class KeepsNothing(Data):
    def __init__(self, **config: Any) -> None:
        pass


class PreparesNothing(Data):
    def prepare(self, facts: Facts, progress: Any) -> Any:
        return None


class LauncherRefusesText(TaskLauncher):
    def refuse(self, config: Any, workers: int, others: int) -> Any:
        return "no"

    def launch(self, task: Any) -> Any:
        return None


class NoLaunch(TaskLauncher):
    """Lacks its method."""


class Lazy(nn.Module):
    """Has never seen a batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def forward(self, images: Any) -> Any:
        return self.layers(images)
