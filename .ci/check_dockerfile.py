"""Lints the Dockerfile and rehearses it without an engine: its Python steps run in a temporary folder instead of /.

Steps that need to be root in an image (apt-get, useradd) are read but not run; --lint leaves the rehearsal out.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN = {
    "ARG",
    "FROM",
    "ENV",
    "WORKDIR",
    "COPY",
    "RUN",
    "USER",
    "ENTRYPOINT",
    "CMD",
    "LABEL",
    "EXPOSE",
    "VOLUME",
    "HEALTHCHECK",
}
NEEDS_ROOT = re.compile(r"\b(apt-get|useradd|groupadd|chown)\b")


@dataclass
class Step:
    """One instruction: its line, its name, the rest of it."""

    line: int
    name: str
    text: str


def parse(dockerfile: str) -> list[Step]:
    """The instructions, continuation lines joined, comments left out."""
    steps, pending, began = [], "", 0
    for number, line in enumerate(dockerfile.splitlines(), 1):
        if line.lstrip().startswith("#") or not (pending or line.strip()):
            continue
        began = began or number
        pending += line.rstrip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            name, _, text = pending.strip().partition(" ")
            steps.append(Step(began, name.upper(), text.strip()))
            pending, began = "", 0
    return steps


def lint(steps: list[Step], ignored: str) -> list[str]:
    """What is wrong, a sentence each."""
    found = [f"line {s.line}: {s.name}: use COPY or another way" for s in steps if s.name not in KNOWN]
    for step in steps:
        found += [f"line {step.line}: {problem}" for problem in _problems(step, steps, ignored.splitlines())]
    users = [s.text for s in steps if s.name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("the image runs as root: the last USER must be another")
    entry = [s.text for s in steps if s.name == "ENTRYPOINT"]
    if entry != ['["python", "-m", "trainer"]']:
        found.append(f'ENTRYPOINT must be ["python", "-m", "trainer"], once; is {entry}')
    if not any(s.name == "ENV" and "TRAINER_CACHE=/" in s.text for s in steps):
        found.append("TRAINER_CACHE is not set")
    return found


def _problems(step: Step, steps: list[Step], ignored: list[str]) -> list[str]:
    if step.name == "FROM":
        defaults = dict(s.text.split("=", 1) for s in steps if s.name == "ARG" and "=" in s.text)
        image = re.sub(r"\$\{?(\w+)\}?", lambda found: defaults.get(found[1], ""), step.text).split()[0]
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        pinned = re.search(r"@sha256:[0-9a-f]{64}$", image)
        return [f"{image} has no fixed tag, or no digest"] if tag in ("", "latest") or not pinned else []
    if step.name == "COPY":
        *sources, _ = [w for w in step.text.split() if not w.startswith("--")]
        absent = [f"{s} is not in the checkout" for s in sources if not list(ROOT.glob(s))]
        return absent + [f"{s} is kept out by .dockerignore" for s in sources if _is_ignored(s, ignored)]
    if step.name == "WORKDIR" and not step.text.startswith("/"):
        return [f"WORKDIR {step.text} is relative"]
    if step.name in ("ENTRYPOINT", "CMD") and not _is_exec_form(step.text):
        return [f"{step.name} must be a JSON list, so that signals reach the program"]
    if step.name == "RUN" and "apt-get install" in step.text:
        needed = ("apt-get update", " -y", "--no-install-recommends", "rm -rf /var/lib/apt/lists")
        return [f"apt-get install without {word.strip()}" for word in needed if word not in step.text]
    if step.name == "RUN" and re.search(r"\bsudo\b|://", step.text):
        return ["RUN uses sudo or an address"]
    return []


def _is_ignored(path: str, patterns: list[str]) -> bool:
    """The last pattern that matches decides, as in Docker."""
    verdict = False
    for pattern in (p.strip() for p in patterns if p.strip() and not p.startswith("#")):
        if fnmatch.fnmatch(path, pattern.removeprefix("!").removeprefix("**/")):
            verdict = not pattern.startswith("!")
    return verdict


def _is_exec_form(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


def rehearse(steps: list[Step], root: Path) -> None:
    """Do the steps under `root`, then start the entry point there.

    Raises:
        subprocess.CalledProcessError: a step failed.
    """
    own = {s.text.split("/")[1] for s in steps if s.name == "WORKDIR"}
    own |= {path for s in steps if s.name == "ENV" for path in re.findall(r"=/(\w+)", s.text)}

    def moved(text: str) -> str:
        return re.sub(rf"(?<![\w./$}}])/({'|'.join(sorted(own))})\b", rf"{root}/\1", text)

    base = root / "base-image"
    base.mkdir()
    (base / "python").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{base}:{env['PATH']}"
    folder, entry = root, []
    for step in steps:
        if step.name == "WORKDIR":
            folder = Path(moved(step.text))
            folder.mkdir(parents=True, exist_ok=True)
        elif step.name == "ENV":
            for key, value in re.findall(r"(\w+)=(\S+)", step.text):
                if key not in (
                    "UV_NO_CACHE",
                    "UV_COMPILE_BYTECODE",
                    "HOME",
                ):  # wheels of this machine, for two commands
                    env[key] = moved(value).replace("$PATH", env["PATH"])
        elif step.name == "COPY":
            *sources, target = step.text.split()
            for source in (s for pattern in sources for s in ROOT.glob(pattern)):
                to = folder / (source.name if target == "./" else target)
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, to)
        elif step.name == "RUN" and NEEDS_ROOT.search(step.text):
            print(f"line {step.line}: not run here (needs root in an image): {step.text}", flush=True)
        elif step.name == "RUN":
            print(f"line {step.line}: {step.text}", flush=True)
            subprocess.run(["sh", "-ec", moved(step.text)], cwd=folder, env=env, stdin=subprocess.DEVNULL, check=True)
        elif step.name == "ENTRYPOINT":
            entry = json.loads(step.text)
    subprocess.run([sys.executable, ROOT / ".ci" / "share_compiled.py", env["VIRTUAL_ENV"]], check=True)
    for arguments in (["--help"], ["+recipe=digits_lenet", "max_steps=20"]):
        print(f"entry point: {' '.join([*entry, *arguments])}", flush=True)
        command = [shutil.which(entry[0], path=env["PATH"]), *entry[1:], *arguments]
        quiet = subprocess.PIPE
        subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=quiet, check=True)  # type: ignore[arg-type]
    if not list(folder.glob("outputs/**/model.safetensors")):
        sys.exit(f"the run left nothing under {folder}/outputs")


def main() -> None:
    steps = parse((ROOT / "Dockerfile").read_text())
    if problems := lint(steps, (ROOT / ".dockerignore").read_text()):
        sys.exit("\n".join(["Dockerfile:", *problems]))
    print(f"Dockerfile: {len(steps)} instructions, nothing to object to", flush=True)
    if "--lint" not in sys.argv:
        with tempfile.TemporaryDirectory(prefix="image-") as root:
            rehearse(steps, Path(root))


if __name__ == "__main__":
    main()
