"""Classes go by their names: what saved weights call their outputs is compared with what the data call their labels."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file
from sklearn import metrics as truth

import trainer as package
from tests.data.named_classes import ALL, points
from tests.runs import read
from trainer.errors import UserError
from trainer.models.finetune import finetuned
from trainer.models.lenet import LeNet

SOURCE = """
    +recipe=digits_lenet data._target_=tests.data.named_classes.Named data.num_classes=null tracking=none
    data.batch_size=8
""".split()


def named(*names: str, silent: bool = False) -> list[str]:
    return [*SOURCE, f"+data.names=[{','.join(names)}]", *(["+data.silent=true"] if silent else [])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on all four classes, in their order."""
    folder = tmp_path_factory.mktemp("named") / "run"
    assert package.run([*named(*ALL), "epochs=3", f"hydra.run.dir={folder}"]).status == "done"
    return folder


def evaluated(trained: Path, folder: Path, *data: str) -> dict[str, float]:
    return package.run([*data, "mode=eval", f"weights={trained}", f"hydra.run.dir={folder}"]).metrics


def plan_of(folder: Path) -> Any:
    return read(folder / "plan.json")


def test_classes_in_another_order_are_mapped_by_name(trained: Path, tmp_path: Path) -> None:
    usual = evaluated(trained, tmp_path / "usual", *named(*ALL))
    assert usual["val/acc1"] > 0.5 and plan_of(tmp_path / "usual")["remarks"]["concern"] == ""
    other = evaluated(trained, tmp_path / "other", *named(*reversed(ALL)))
    assert other == usual
    assert (
        "the 4 classes of" in (said := plan_of(tmp_path / "other")["remarks"]["concern"]) and "in another order" in said
    )
    tables = [(tmp_path / run / "per_class.csv").read_text() for run in ("usual", "other")]
    assert tables[0] == tables[1] and json.loads((tmp_path / "other" / "classes.json").read_text()) == ALL


def test_some_of_the_classes_are_measured_as_what_the_model_says_of_them(trained: Path, tmp_path: Path) -> None:
    some = ["rose", "iris"]
    found = evaluated(trained, tmp_path / "run", *named(*some), "data.val_batch_size=3", "launch.nproc=1")
    inputs, called = points(some, 10, 1)
    model = LeNet(4, 1, 8)
    load_model(model, str(trained / "model.safetensors"))
    with torch.no_grad():
        scores = model.eval()(torch.from_numpy(inputs))
    labels, guesses = torch.tensor([ALL.index(name) for name in called]), scores.argmax(1)
    assert found["val/loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, labels).item(), abs=1e-6)
    assert found["val/acc1"] == truth.accuracy_score(labels, guesses)
    there = truth.f1_score(labels, guesses, labels=[1, 3], average="macro")
    assert found["val/f1"] == pytest.approx(there, abs=1e-12), "the mean over classes that the data have"
    rows = list(csv.DictReader((tmp_path / "run" / "per_class.csv").open()))
    assert [(row["name"], row["samples"]) for row in rows] == [
        ("daisy", "0"),
        ("iris", "10"),
        ("pansy", "0"),
        ("rose", "10"),
    ]


def test_classes_that_the_weights_do_not_know_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"its classes are daisy; iris; pansy; rose, and points of 4 has cat, which it does not know"
    ):
        evaluated(trained, tmp_path / "run", *[part.replace("pansy", "cat") for part in named(*ALL)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_weights_without_names_are_taken_in_the_order_of_the_data_and_that_is_said(
    trained: Path, tmp_path: Path, mode: str
) -> None:
    from trainer.config.run_config import RunConfig
    from trainer.data.source import Facts
    from trainer.planning.class_names import of_outputs

    weights = tmp_path / "copy.safetensors"
    weights.write_bytes((trained / "model.safetensors").read_bytes())
    config, source = _config(mode=mode, weights=str(weights)), _source(ALL)
    facts: Facts = source.facts(8)
    assert isinstance(config, RunConfig)
    classes = of_outputs(config, source, facts)
    assert "there is no classes.json beside" in classes.said and not classes.labels
    assert list(classes.names) == (ALL if mode == "predict" else [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    config = _config(mode=mode, weights=f"{tmp_path}/run/model.safetensors")
    assert f"{tmp_path}/run has no classes.json" in of_outputs(config, source, facts).said
    assert of_outputs(config, _source(ALL, silent=True), facts).said == ""


def test_labels_without_names_are_taken_in_the_order_of_the_run_and_that_is_said(trained: Path, tmp_path: Path) -> None:
    evaluated(trained, tmp_path / "run", *named(*ALL, silent=True))
    assert "have no names" in plan_of(tmp_path / "run")["remarks"]["concern"]
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == ALL


def test_a_run_does_not_go_on_with_other_classes(trained: Path, tmp_path: Path) -> None:
    other = [part.replace("pansy", "cat") for part in named(*ALL)]
    more = [*other, "epochs=4", f"resume={trained}", f"hydra.run.dir={tmp_path}/run"]
    with pytest.raises(UserError, match=r"the classes were daisy; iris; pansy; rose, are daisy; iris; cat; rose"):
        package.run(more)
    with pytest.raises(UserError, match=r"the classes were .*, are daisy; iris, and the head"):
        package.run([*named(*ALL[:2]), "epochs=4", f"resume={trained}", f"hydra.run.dir={tmp_path}/run"])
    turned = [*named(*reversed(ALL)), *more[len(other) :], "resume.allow_changes=true"]
    assert package.run(turned).status == "done"


def test_servers_do_not_start_from_a_run_with_other_classes(trained: Path) -> None:
    from trainer.planning.class_names import of_outputs

    strategy = {
        "_target_": "trainer.strategies.builtin.PserverAsyncDeclaration",
        "load_from": f"{trained}/checkpoints/persistables",
    }
    config, source = _config(strategy=strategy), _source([*ALL[:3], "cat"])
    with pytest.raises(UserError, match=r"load_from=.*: it is of a run with the classes daisy; iris; pansy; rose"):
        of_outputs(config, source, source.facts(8))
    of_outputs(config, _source(ALL), _source(ALL).facts(8))


def test_the_head_of_a_run_with_other_classes_is_new(trained: Path, tmp_path: Path) -> None:
    from torchvision.models import squeezenet1_1

    from trainer.planning.class_names import new_head

    torch.manual_seed(0)
    weights = {name: tensor.contiguous() for name, tensor in squeezenet1_1(num_classes=4).state_dict().items()}
    run = tmp_path / "run"
    run.mkdir()
    save_file(weights, run / "model.safetensors")
    (run / "plan.json").write_text("{}")
    (run / "classes.json").write_text(json.dumps(ALL))
    node = {
        "_target_": "trainer.models.finetune.finetuned",
        "name": "squeezenet1_1",
        "weights": f"{run}/model.safetensors",
        "head": "auto",
        "num_classes": 4,
    }
    same, said = new_head(_config(model=node), _source(ALL), _source(ALL).facts(8))
    assert same.model["head"] == "auto" and not said
    others = [*ALL[:3], "cat"]
    config, said = new_head(_config(model=node), _source(others), _source(others).facts(8))
    assert config.model["head"] == "new" and "the head is new" in said
    for head in ("auto", "new"):
        torch.manual_seed(1)
        own = finetuned("squeezenet1_1", f"{run}/model.safetensors", 4, head=head).state_dict()
        kept = {name for name, tensor in own.items() if torch.equal(tensor, weights[name])}
        assert set(own) - kept == ({"classifier.1.weight"} if head == "new" else set()), "its bias begins at 0"


def _config(**changes: Any) -> Any:
    from trainer.config.run_config import RunConfig

    return RunConfig.of(
        {"data": {"_target_": "tests.data.named_classes.Named"}, "model": {"_target_": "torch.nn.Identity"}, **changes}
    )


def _source(names: list[str], silent: bool = False) -> Any:
    from tests.data.named_classes import Named

    return Named(names=names, silent=silent)
