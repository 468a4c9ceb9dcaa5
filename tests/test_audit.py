"""What ``make audit`` makes of pip-audit's answers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
assert spec and spec.loader
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

HOLE = {"id": "PYSEC-2025-1", "aliases": ["CVE-2025-68146"], "fix_versions": ["3.20.1"], "description": "..."}
FILELOCK = {"name": "filelock", "version": "3.13", "vulns": [HOLE]}
SOUND = {"name": "numpy", "version": "2.4", "vulns": []}
UNKNOWN = {"name": "trainer", "skip_reason": "Dependency not found on PyPI"}


def test_each_hole_is_named_with_the_version_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"dependencies": [FILELOCK, SOUND, UNKNOWN]}
    assert audit.holes(report) == (["filelock 3.13: PYSEC-2025-1, CVE-2025-68146 (fixed in 3.20.1)"], 2)
    monkeypatch.setitem(audit.IGNORED, "CVE-2025-68146", "no lock of ours lies where others write")
    assert audit.holes(report) == ([], 2)


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ({"pypi": ([], 40)}, 0, "40 packages looked up at pypi, 0 holes"),
        ({"pypi": (["a hole"], 40)}, 1, "a hole"),
        ({"osv": (["a hole"], 40)}, 1, "looked up at osv, 1 holes"),
        ({}, 0, "no vulnerability service can be reached from here; the dependencies were not audited"),
    ],
)
def test_unreachable_service_is_said_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, tuple[list[str], int]],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(audit, "audit", lambda service: answers.get(service, ([], 0)))
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 0}))
    assert audit.main() == code
    assert said in capsys.readouterr().out


def test_pip_audit_that_says_nothing_has_looked_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": ""}))
    assert audit.audit("pypi") == ([], 0)


def test_every_test_that_the_page_on_security_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert len(named) > 10 and [name for name in named if not (ROOT / name).is_file()] == []
