"""Builds the wheel, installs it in a clean environment, and trains from an empty folder; then plans from the
checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
TRAIN = ["+recipe=digits_lenet", "max_steps=20"]


def run(command: list[str | Path], folder: Path, **env: str) -> str:
    """Run a command without PYTHONPATH; its output.

    Raises:
        SystemExit: it failed.
    """
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | env
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}: {' '.join(map(str, command))}  (in {folder})")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel, made from the source distribution as a registry would."""
    run([UV, "build", "--out-dir", folder, ROOT], folder)
    return next(folder.glob("*.whl"))


def check_names(wheel: Path) -> None:
    """Only `trainer` and its metadata at the top; every option and recipe inside `trainer`."""
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    if strangers := {name for name in top if name != "trainer" and not name.endswith(".dist-info")}:
        sys.exit(f"the wheel adds to site-packages: {', '.join(sorted(strangers))}")
    expected = {f"trainer/{p.relative_to(ROOT)}" for g in ("conf", "recipes") for p in (ROOT / g).rglob("*.yaml")}
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "trainer").rglob("*.py")}
    if missing := expected - names:
        sys.exit(f"the wheel lacks {', '.join(sorted(missing))}")


def check_training(command: list[str | Path], home: Path, overrides: list[str]) -> None:
    """Train in an empty folder; results appear there, and mlflow.db with tracking."""
    home.mkdir()
    run([*command, *overrides], home)
    results = list(home.glob("outputs/**/result.json"))
    if len(results) != 1 or json.loads(results[0].read_text())["status"] != "done":
        sys.exit(f"{' '.join(overrides)}: no finished run under {home}/outputs")
    if "tracking=none" not in overrides and not (home / "mlflow.db").is_file():
        sys.exit(f"{' '.join(overrides)}: no mlflow.db in {home}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        scratch = Path(name)
        empty = scratch / "empty"
        empty.mkdir()

        wheel = build(scratch)
        check_names(wheel)
        print(f"{wheel.name}: only trainer, with all options and recipes", flush=True)

        venv = scratch / "venv"
        run([UV, "venv", "--python", sys.executable, venv], scratch)
        python = venv / "bin" / "python"
        run([UV, "pip", "install", "--python", python, wheel], scratch)
        run([sys.executable, ROOT / ".ci" / "share_compiled.py", venv], scratch)
        where = run([python, "-c", "import trainer; print(trainer.__file__)"], empty).strip()
        if not Path(where).is_relative_to(venv):
            sys.exit(f"the clean environment imports {where}")
        if "+recipe=digits_lenet" not in run([python, "-m", "trainer", "--help"], empty):
            sys.exit("--help lists no recipes")
        print("installed in a clean environment: --help", flush=True)

        module, script = [python, "-m", "trainer"], [venv / "bin" / "trainer"]
        for command, more in ((script, []), (module, ["launch.nproc=2", "tracking=none"])):
            check_training(command, scratch / command[0].name, [*TRAIN, *more])
            print(f"wheel, from an empty folder: {command[0].name} ... {' '.join([*TRAIN, *more])}", flush=True)
        run([sys.executable, "-m", "trainer", *TRAIN, "plan=true"], empty)
        print("checkout, from another working directory: python -m trainer ... plan=true", flush=True)


if __name__ == "__main__":
    main()
