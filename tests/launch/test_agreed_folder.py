"""Hosts whose run folder has the time in its name use the name that host 0's clock gave it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.pace import wait_for
from tests.ports import ports
from tests.runs import start
from trainer.launch.agreed_folder import with_numbers_of


@pytest.mark.parametrize(
    ("own", "named", "wanted"),
    [
        ("/a/outputs/x/2026-11-28_10-00-01", "/a/outputs/x/2026-11-28_10-00-00", "/a/outputs/x/2026-11-28_10-00-00"),
        ("/a/2026-11-29/00-00-00", "/a/2026-11-28/23-59-59", "/a/2026-11-28/23-59-59"),
        ("/a/x/10-00-01", "/a/x/10-00-00-1", "/a/x/10-00-00-1"),
        ("/home/b/x/10-00-01", "/home/a/x/10-00-00", "/home/b/x/10-00-00"),
        ("/a/x/10-00-01", "/a/x/../../etc", "/a/x/10-00-01"),
        ("/a/x/10-00-01", "/a/evil/10-00-00", "/a/x/10-00-00"),
        ("/a/x/10-00-01", "", "/a/x/10-00-01"),
    ],
)
def test_only_numbers_are_taken_from_host_0(own: str, named: str, wanted: str) -> None:
    assert with_numbers_of(Path(own), Path(named)) == Path(wanted)


def test_hosts_that_start_at_other_seconds_have_one_folder_with_whole_checkpoints(tmp_path: Path) -> None:
    [port] = ports(1)
    argv = ["+recipe=digits_lenet", "tracking=none", "epochs=1", "limit_train_batches=2", "limit_val_batches=1"]
    hosts = []
    for number in (0, 1):
        topology = ["launch.nnodes=2", f"launch.node_rank={number}", f"launch.master_port={port}"]
        hosts.append(start(*argv, *topology, cwd=tmp_path, GLOO_SOCKET_IFNAME="lo"))
        time.sleep(1.1)  # the names have seconds
    wait_for(lambda: all(host.poll() is not None for host in hosts), 120, "both hosts end")
    assert [host.returncode for host in hosts] == [0, 0], (tmp_path / "screen.txt").read_text()
    [run] = (tmp_path / "outputs" / "digits_lenet").iterdir()
    assert {"workerlog.0", "workerlog.1", "host.1"} <= {path.name for path in run.iterdir()}
    assert (run / "checkpoints" / "step-000000002" / "COMPLETE").exists()
