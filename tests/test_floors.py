"""The floors that pyproject.toml names: who may import whom."""

import tomllib
from pathlib import Path

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
        not in ("__init__", "__pycache__", "contract", "lost_workers", "replicas")  # they are parts of the contract
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
