"""What torchrun's ranks believe: rank 0 alone, whoever else writes into torchrun's open store."""

from __future__ import annotations

import json
import os
import pickle
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.stranger import Bomb
from tests.runs import start
from trainer.config import redact
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.launch import torchrun
from trainer.launch.torchrun_handover import SECRET, InFolder, Sealed, agents_folder, handover

GOOD = "0123456789abcdef" * 4
PAYLOAD = {"config": {"lr": 0.1, "betas": [0.9, 0.999], "name": "ß", "of": None}, "run_dir": "runs/1"}


def ranks_environment(folder: Path, **extra: str) -> dict[str, str]:
    """What torchrun tells the second rank of two, of which all are here."""
    names = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / "attempt_0" / "1" / "error.json"),
    }
    return {**names, **extra}


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A folder as torchrun's agent makes it."""
    folder = tmp_path / "none_abc"
    (folder / "attempt_0" / "1").mkdir(parents=True)
    folder.chmod(0o700)
    return folder


@pytest.mark.parametrize("hosts", [1, 2])
def test_stranger_who_writes_into_the_store_runs_no_code(agents: Path, hosts: int) -> None:
    marker = agents / "taken"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key in ("payload", "handover", "stop"):  # the trainer's part of torchrun's store
        store.set(f"trainer/{key}", pickle.dumps(Bomb(str(marker))))  # type: ignore[arg-type]
    extra = {"WORLD_SIZE": str(2 * hosts), "MASTER_PORT": str(store.port), SECRET: GOOD if hosts > 1 else ""}
    rank = start("+recipe=digits_lenet", cwd=agents, **ranks_environment(agents, **extra))
    if hosts == 1:  # it waits for rank 0's file, whatever the store says
        InFolder(agents / "attempt_0").stop("not today")
    code, said = rank.wait(1200), (agents / "screen.txt").read_text()
    assert not marker.exists(), f"code of a stranger ran as {marker.read_text()}"
    assert code == (1 if hosts > 1 else 2)
    assert ("is not from rank 0 of this run" in said) == (hosts > 1) and "Traceback" not in said


def test_config_passes_through_a_file_for_this_user_alone_and_does_not_stay(tmp_path: Path) -> None:
    way = InFolder(tmp_path)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(InFolder(tmp_path).take()))
    waiting.start()
    way.give(PAYLOAD)
    waiting.join(60)
    assert got == [PAYLOAD]
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    way.stop("")
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"stop": ""}'] and way.take() == ""


def test_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"payload": PAYLOAD}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "handover.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(OSError, match="symbolic link"):
        InFolder(tmp_path / "run").take()


def test_ranks_that_wait_in_vain_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 0 handed nothing over within 0 s"):
        InFolder(tmp_path, patience_s=0).take()


def test_sealed_config_is_believed_with_the_secret_of_the_run_alone() -> None:
    store = dist.HashStore()
    Sealed(store, GOOD, "run 0 4").give(PAYLOAD)
    assert Sealed(store, GOOD, "run 0 4").take() == PAYLOAD
    token = store.get(Sealed.KEY)
    assert b"betas" not in token, "nobody else reads it"
    with pytest.raises(RunFailed, match="differs between the hosts"):
        Sealed(store, GOOD[::-1], "run 0 4").take()
    with pytest.raises(RunFailed, match="is of another run"):
        Sealed(store, GOOD, "run 1 4").take()
    for at in range(0, len(token), 7):
        store.set(Sealed.KEY, (token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :]).decode("latin-1"))
        with pytest.raises(RunFailed, match="is not from rank 0"):
            Sealed(store, GOOD, "run 0 4").take()


def test_what_json_cannot_carry_is_named() -> None:
    with pytest.raises(RunFailed, match="Path"):
        Sealed(dist.HashStore(), GOOD, "").give({"config": Path("a")})


def test_agents_folder_is_taken_only_if_nobody_else_can_reach_into_it(agents: Path, tmp_path: Path) -> None:
    told = ranks_environment(agents)
    assert agents_folder(told) == agents / "attempt_0"
    assert isinstance(handover(dist.HashStore(), told), InFolder)
    for mode in (0o755, 0o770, 0o701):
        agents.chmod(mode)
        assert agents_folder(told) is None
    agents.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(agents, 65534, 65534)
        assert agents_folder(told) is None, "of another user"
        os.chown(agents, 0, 0)
    (tmp_path / "link").symlink_to(agents)
    assert agents_folder(ranks_environment(tmp_path / "link")) is None
    assert agents_folder({**told, "TORCHELASTIC_ERROR_FILE": ""}) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"WORLD_SIZE": "4"}, "is not set; over several hosts"),
        ({"TORCHELASTIC_ERROR_FILE": ""}, "is not set; without a log folder"),
        ({SECRET: "short"}, "is shorter than 32 characters"),
    ],
)
def test_ranks_without_a_way_to_know_rank_0_refuse(agents: Path, changed: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        handover(dist.HashStore(), ranks_environment(agents, **changed))
    assert "openssl rand -hex 32" in str(caught.value)


def test_several_hosts_with_a_secret_seal(agents: Path) -> None:
    told = ranks_environment(agents, WORLD_SIZE="4", **{SECRET: GOOD})
    way = handover(dist.HashStore(), told)
    assert isinstance(way, Sealed) and way.run == "none 0 4"


def test_error_of_a_rank_is_told_to_torchrun_without_secrets(agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ranks_environment(agents).items():
        monkeypatch.setenv(name, value)
    config = SimpleNamespace(model={"hub_token": "s3cret-of-a-hub"})
    plan = SimpleNamespace(
        topology=SimpleNamespace(device="cpu"),
        strategy=SimpleNamespace(entries={"worker": "tests.launch.test_torchrun:breaks"}),
    )
    given: Any = SimpleNamespace(config=config, plan=plan, secrets=("s3cret-of-a-hub",))
    with pytest.raises(RunFailed, match=r"worker 1:[^\0]*ValueError: logging in with \(hidden\)") as caught:
        torchrun._work(dist.HashStore(), InFolder(agents).board(), given, 1)
    told = (agents / "attempt_0" / "1" / "error.json").read_text()
    assert "logging in with (hidden)" in told
    assert "s3cret" not in told + str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RunFailed("the hub refuses s3cret-of-a-hub"),
        UserError("model.hub_token=s3cret-of-a-hub", "is of nobody", "another one"),
        Interrupted("got SIGTERM while logging in with s3cret-of-a-hub"),
    ],
)
def test_error_of_rank_0_is_left_for_torchrun_without_secrets(
    agents: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (agents / "attempt_0" / "0").mkdir()
    file = agents / "attempt_0" / "0" / "error.json"
    for name, value in ranks_environment(agents, RANK="0", LOCAL_RANK="0", TORCHELASTIC_ERROR_FILE=str(file)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "_store", dist.HashStore)

    def lead(_: Any) -> None:
        redact.HERE.learn(["s3cret-of-a-hub"])  # as a job does once it has composed its config
        raise error

    with redact.HERE.for_now(), pytest.raises(type(error)):
        torchrun.join(lead)
    said = json.loads(file.read_text())["message"]  # the form that torchrun's agent reads
    assert said["message"] == str(error).replace("s3cret-of-a-hub", "(hidden)")
    assert said["extraInfo"]["timestamp"].isdecimal()
    left = [path for path in agents.rglob("*") if path.is_file()]
    assert len(left) == 2 and not any("s3cret" in path.read_text() for path in left)


def breaks(seat: Any, given: Any) -> None:
    """A worker whose error shows a secret."""
    raise ValueError(f"logging in with {given.config.model['hub_token']}")
