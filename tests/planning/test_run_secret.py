"""The secret by which hosts know each other: where it comes from, and which are refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.composed import ready
from trainer.config import redact, schema
from trainer.errors import UserError
from trainer.host import private
from trainer.job import plan_table
from trainer.planning import run_secret as run_secrets
from trainer.planning.plan import Plan
from trainer.planning.run_secret import MAKE, VARIABLE, run_secret
from trainer.tracking.describe import tags

GOOD = "0123456789abcdef" * 4


def told(file: Path | None = None, **environment: str) -> str:
    with redact.HERE.for_now():
        return run_secret(schema.LaunchConfig(secret_file=file and str(file)), environment)


def written(folder: Path, text: str = GOOD + "\n", mode: int = 0o600) -> Path:
    path = folder / "run.secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_secret_is_the_files_then_the_variables_then_none(tmp_path: Path) -> None:
    other = "another secret that is long enough"
    assert told(written(tmp_path), **{VARIABLE: other}) == GOOD
    assert told(**{VARIABLE: f" {other}\n"}) == other
    assert told() == ""


def test_command_that_the_refusal_shows_makes_a_file_that_is_taken(tmp_path: Path) -> None:
    subprocess.run(MAKE, shell=True, cwd=tmp_path, check=True)
    assert len(told(tmp_path / "run.secret")) == 64


def test_commands_of_one_process_number_that_begin_together_have_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers that share the cache. The second begins when the first has written its own, and is faster."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getpid", lambda: 7)
    write, others = private.write, []

    def before_another(path: Path, text: str) -> None:
        write(path, text)
        if not others:
            others.append("")
            others.append(run_secrets._of_cache())

    monkeypatch.setattr(private, "write", before_another)
    assert run_secrets._of_cache() == others[1]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["run.secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620])
def test_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="other users"):
        told(written(tmp_path, mode=mode))


@pytest.mark.parametrize(("text", "why"), [("", "is empty"), (" \n", "is empty"), ("secret", "shorter than 32")])
def test_secret_that_can_be_guessed_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        told(written(tmp_path, text))
    if text.strip():
        with pytest.raises(UserError, match=why):
            told(**{VARIABLE: text})


def test_what_is_no_file_of_this_users_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        told(tmp_path / "absent")
    with pytest.raises(UserError, match="is no file"):
        told(tmp_path)
    (tmp_path / "link").symlink_to(written(tmp_path))
    with pytest.raises(UserError, match="cannot be read"):
        told(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(UserError, match="is no file"):
        told(tmp_path / "fifo")
    if os.geteuid() == 0:
        os.chown(tmp_path / "run.secret", 65534, 65534)
        with pytest.raises(UserError, match="another user"):
            told(tmp_path / "run.secret")


def test_secret_is_hidden_in_all_that_is_printed_and_its_files_name_is_not(tmp_path: Path) -> None:
    path = written(tmp_path)
    config = {"launch": {"secret_file": str(path)}}
    with redact.HERE.for_now():
        run_secret(schema.LaunchConfig(secret_file=str(path)), {})
        assert redact.text(f"it is {GOOD}") == "it is (hidden)"
        assert redact.hide(config) == config


HOSTS = "+recipe=digits_lenet launch.nnodes=2 launch.master_addr=127.0.0.1 launch.master_port=0 device=cpu".split()
SERVED = (*HOSTS, "strategy=pserver_async", "launch.servers=1")


def planned(*overrides: str) -> Plan:
    with redact.HERE.for_now():
        return ready(*overrides).plan


def test_servers_between_hosts_are_refused_without_a_secret_and_the_command_that_makes_one_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match="there is none") as caught:
        planned(*SERVED)
    assert MAKE in str(caught.value) and caught.value.instead.startswith("launch.secret_file=run.secret")
    assert planned(*HOSTS).strategy.name == "collective", "which has no secrets anyway"
    assert not planned(*SERVED, f"launch.secret_file={written(tmp_path)}").topology.insecure
    monkeypatch.setenv(VARIABLE, GOOD)
    assert not planned(*SERVED).topology.insecure
    with pytest.raises(UserError, match="No such file"):
        planned(*HOSTS, "launch.secret_file=absent")


def test_run_that_may_be_insecure_says_so_in_its_plan_and_its_tags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plan = planned(*SERVED, "launch.insecure=true")
    assert plan.topology.insecure and tags(plan, [])["trainer.insecure"] == "yes"
    assert ("secret", "none (launch.insecure=true)") in list(plan_table.rows(plan))
    plan_table.show_plan(plan)
    assert f"ATTENTION: {plan_table.INSECURE}" in capsys.readouterr().out
    one_host = planned("+recipe=digits_lenet", "strategy=pserver_async", "launch.servers=1", "launch.insecure=true")
    assert not one_host.topology.insecure and tags(one_host, [])["trainer.insecure"] == "no"
