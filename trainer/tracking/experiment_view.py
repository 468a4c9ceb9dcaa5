"""The view of an experiment's runs that MLflow's page opens with: its columns, and the order of its charts.

MLflow keeps a shared view of a list of runs as a tag of the experiment; an address with ``viewStateShareKey`` opens it
(MLflow 3.17, ``mlflow.sharedViewState.KEY``; plain JSON is read as well as the page's own packed text). Without it, the
list of runs shows neither a metric nor a parameter.
"""

from __future__ import annotations

import json

KEY = "trainer"
TAG = f"mlflow.sharedViewState.{KEY}"
PARAMETERS = ("data.batch_size", "optimizer.lr", "epochs")
SECTIONS = ("val", "test", "train", "perf")
"""The charts' sections from top to bottom; MLflow's own order is that of the alphabet, with ``perf`` first."""


def view(best: str, loss: str = "val/loss") -> str:
    """The value of the experiment's tag.

    Args:
        best: the metric that marks the best model, such as ``val/acc1``.
        loss: the metric shown beside it.
    """
    columns = [
        "attributes.`Duration`",
        *(f"metrics.`{name}`" for name in dict.fromkeys((best, loss))),
        *(f"params.`{name}`" for name in PARAMETERS),
    ]
    sections = [{"uuid": f"{KEY}-{name}", "name": name, "display": True, "isReordered": True} for name in SECTIONS]
    return json.dumps(
        {
            "selectedColumns": columns,
            "compareRunSections": sections,
            "compareRunCharts": [],
            "isAccordionReordered": True,
        }
    )
