"""What a user installs: the wheel's contents, the two commands of the README, the Dockerfile, and no trace of one
machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("demo", "test")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def build(folder: Path, version: str) -> zipfile.ZipFile:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=[version])
    return zipfile.ZipFile(path)


def help_of(package_root: Path, folder: Path) -> str:
    """What --help prints when `trainer` is imported from `package_root`."""
    env = {**os.environ, "PYTHONPATH": str(package_root)}
    where = [sys.executable, "-c", "import trainer; print(trainer.__file__)"]
    found = subprocess.run(where, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).is_relative_to(package_root)
    show = [sys.executable, "-m", "trainer", "--help"]
    return subprocess.run(show, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(tmp_path_factory.mktemp("wheel"), "standard")


def test_wheel_adds_only_trainer_to_site_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"trainer"}


def test_wheel_carries_every_option_recipe_and_module(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"trainer/{p.relative_to(ROOT)}" for group in ("conf", "recipes") for p in (ROOT / group).rglob("*.yaml")
    }
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "trainer").rglob("*.py")}
    assert expected <= set(wheel.namelist())


def test_wheel_says_the_same_as_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    wheel.extractall(installed)
    shown = help_of(installed, empty)
    assert shown == help_of(ROOT, empty)
    assert "+recipe=digits_lenet" in shown


def test_editable_install_copies_nothing(tmp_path: Path) -> None:
    names = build(tmp_path, "editable").namelist()
    assert [name for name in names if ".dist-info/" not in name] == ["_trainer.pth"]


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_and_makefile_agree_on_the_two_commands(command: str) -> None:
    assert re.search(rf"\bmake {command}\b", read("README.md")), f"README.md does not say `make {command}`"
    assert re.search(rf"^{command}:", read("Makefile"), re.M)
    assert f"make {command}" in read(".ci/run")


def test_every_command_that_is_documented_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.M))
    documented = {
        c for name in ("README.md", "CONTRIBUTING.md") for c in re.findall(r"`make ([a-z][\w-]*)", read(name))
    }
    assert documented <= targets


def test_demo_runs_a_recipe_that_exists() -> None:
    recipes = re.findall(r"\+recipe=(\w+)", read("Makefile"))
    assert recipes
    for recipe in recipes:
        assert (ROOT / "recipes" / "recipe" / f"{recipe}.yaml").is_file()


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    dependencies = [
        *project["dependencies"],
        *(d for group in project["optional-dependencies"].values() for d in group),
    ]
    lines = read("pyproject.toml").splitlines()
    for dependency in dependencies:
        assert any(re.match(rf'\s*"{re.escape(dependency)}",\s+# \w', line) for line in lines), (
            f"{dependency} has no reason"
        )


def test_hooks_use_the_tools_of_the_environment() -> None:
    repositories = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [r["repo"] for r in repositories] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for r in repositories for hook in r["hooks"])


@pytest.mark.all
def test_no_file_names_a_registry_or_a_machine() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    hosts = [rf"\b{a}{b}\.org\b" for a, b in (("py", "pi"), ("python", "hosted"), ("download.py", "torch"))]
    options = [rf"{dashes}{word}-url" for dashes in ("--", "extra-") for word in ("index",)]
    folders = [rf"(?<![\w.$}}])/{name}/" for name in ("work", "root")]
    trace = re.compile("|".join([*hosts, *options, *folders]))
    found = []
    for name in names:
        path = ROOT / name
        if path.is_file() and (hit := trace.search(path.read_text(errors="ignore"))):
            found.append(f"{name}: {hit[0]}")
    assert not found


@pytest.fixture(scope="module")
def dockerfile_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dockerfile", ROOT / ".ci" / "check_dockerfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_dockerfile_passes_its_check(dockerfile_check: ModuleType) -> None:
    assert dockerfile_check.lint(dockerfile_check.parse(read("Dockerfile")), read(".dockerignore")) == []


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("USER trainer", "USER root", "runs as root"),
        ("USER trainer\n", "", "runs as root"),
        ("BASE=python:3.11-slim@", "BASE=python@", "no fixed tag"),
        ("BASE=python:3.11-slim@", "BASE=python:latest@", "no fixed tag"),
        ("@sha256:be", "#sha256:be", "no digest"),
        ("COPY conf conf", "COPY configs conf", "not in the checkout"),
        ("COPY conf conf", "COPY tests tests", "kept out by .dockerignore"),
        ("COPY conf conf", "ADD conf conf", "use COPY"),
        ('ENTRYPOINT ["python", "-m", "trainer"]', "ENTRYPOINT python -m trainer", "JSON list"),
        ("WORKDIR /runs", "WORKDIR runs", "is relative"),
        (" --no-install-recommends", "", "without --no-install-recommends"),
    ],
)
def test_dockerfile_check_finds(dockerfile_check: ModuleType, good: str, bad: str, complaint: str) -> None:
    text = read("Dockerfile")
    assert good in text
    problems = dockerfile_check.lint(dockerfile_check.parse(text.replace(good, bad)), read(".dockerignore"))
    assert any(complaint in problem for problem in problems)
