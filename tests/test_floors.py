"""The floors that pyproject.toml names: who may import whom."""

import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import trainer

PACKAGE = Path(trainer.__file__).parent


def contracts() -> dict[str, dict[str, object]]:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    return {contract["name"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}


def test_the_worker_is_forbidden_every_strategy() -> None:
    """A new file in strategies/ is named there, or the loop could come to know it."""
    forbidden = contracts()["The loop and the worker know the strategy contract and no strategy by name"][
        "forbidden_modules"
    ]
    there = {
        path.stem
        for path in (PACKAGE / "strategies").iterdir()
        if path.stem
        not in (
            "__init__",
            "__pycache__",
            "contract",
            "lost_workers",
            "replicas",
            "seat",
        )  # they are parts of the contract
    }
    assert set(forbidden) == {f"trainer.strategies.{name}" for name in there}  # type: ignore[call-overload]


def test_all_rules_of_the_parameter_server_are_kept_from_sockets_threads_and_clocks() -> None:
    """A new file is named there, or here if it is of the outside world."""
    outside = {
        "server": {"__init__", "server", "part_writer"},
        "worker": {"__init__", "connections"},
        "protocol": {"__init__", "sockets", "listener", "shared_memory"},
    }
    rules = [
        f"trainer.strategies.pserver.{side}.{path.stem}"
        for side, names in outside.items()
        for path in (PACKAGE / "strategies" / "pserver" / side).glob("*.py")
        if path.stem not in names
    ]
    contract = contracts()["The rules of the parameter server have no sockets, threads and clocks of their own"]
    assert sorted(contract["source_modules"]) == sorted(rules)  # type: ignore[call-overload]


def test_no_floor_has_an_exception() -> None:
    assert not [name for name, contract in contracts().items() if "ignore_imports" in contract]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside of functions and imports for types count as well."""
    graph = grimp.build_graph("trainer", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError with the modules of the circle


def test_what_answers_in_1_5_s_leads_to_nothing_heavy() -> None:
    """Imports for types cost nothing, so this is no contract of import-linter, which would count them."""
    graph = grimp.build_graph(
        "trainer", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    light = ("config", "planning", "strategies.contract", "strategies.builtin", "data.source", "tasks.contract")
    modules = [module for name in light for module in (f"trainer.{name}", *graph.find_descendants(f"trainer.{name}"))]
    heavy = {"torch", "torchvision", "mlflow"} & graph.modules
    chains = [graph.find_shortest_chain(module, package) for module in modules for package in heavy]
    assert heavy and [chain for chain in chains if chain] == []
