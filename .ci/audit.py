"""Looks for known holes: bandit in this code, pip-audit in what it depends on. Exit code 1 when one is found.

Where no vulnerability service can be reached, as on a machine with a package registry alone, it says so and goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IGNORED: dict[str, str] = {}
"""Holes of dependencies that do not concern us, by name (CVE-..., GHSA-..., PYSEC-...), and why."""
SERVICES = ("pypi", "osv")
SECONDS = 300


def holes(report: dict[str, Any]) -> tuple[list[str], int]:
    """What pip-audit's JSON reports: a sentence for each hole, and how many packages were looked up."""
    found, looked_up = [], 0
    for package in report["dependencies"]:
        if "skip_reason" in package:
            continue
        looked_up += 1
        for hole in package["vulns"]:
            names = [hole["id"], *hole.get("aliases", [])]
            if not any(name in IGNORED for name in names):
                fixed = ", ".join(hole.get("fix_versions", [])) or "no version yet"
                found.append(f"{package['name']} {package['version']}: {', '.join(names)} (fixed in {fixed})")
    return found, looked_up


def audit(service: str) -> tuple[list[str], int]:
    """The same, asked of a service; nothing is looked up where it does not answer."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--skip-editable",
        "--progress-spinner",
        "off",
        "--format",
        "json",
        "--vulnerability-service",
        service,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
        return holes(json.loads(done.stdout))
    except (ValueError, subprocess.TimeoutExpired):
        return [], 0


def main() -> int:
    code = subprocess.run([sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", "trainer"], cwd=ROOT)
    for service in SERVICES:
        found, looked_up = audit(service)
        if looked_up:
            print("\n".join([*found, f"pip-audit: {looked_up} packages looked up at {service}, {len(found)} holes"]))
            return 1 if found else code.returncode
    print("pip-audit: no vulnerability service can be reached from here; the dependencies were not audited")
    return code.returncode


if __name__ == "__main__":
    sys.exit(main())
