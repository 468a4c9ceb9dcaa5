"""Eight runs log to MLflow on a real PostgreSQL, which is killed meanwhile: nothing is lost, and nothing twice."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mlflow_server import Server
from tests.pace import wait_for
from tests.runs import environment, zygote

RUNS = 8
STEPS = 2000
ACCOUNT = "postgres"


class PostgreSQL:
    """Debian's PostgreSQL with a cluster of its own, which listens on a socket in its folder alone.

    Args:
        folder: of the cluster, in a path that the account ``postgres`` may enter.
    """

    def __init__(self, folder: Path) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
        if not found or os.getuid() != 0:
            pytest.skip("needs root, and Debian's PostgreSQL: apt-get install postgresql")
        if find_spec("psycopg2") is None:
            pytest.skip("needs psycopg2: pip install psycopg2-binary")
        self.programs, self.folder = found[-1].parent, folder
        account = pwd.getpwnam(ACCOUNT)
        os.chown(folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "-D", f"{folder}/data", "--auth", "trust", "--username", ACCOUNT)
        self.start()
        self._run("createdb", "--host", str(folder), "mlflow")
        self.address = f"postgresql+psycopg2://{ACCOUNT}@/mlflow?host={folder}"

    def _run(self, program: str, *words: str) -> str:
        command = [str(self.programs / program), *words]
        done = subprocess.run(command, user=ACCOUNT, group=ACCOUNT, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder}"
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-o", options, "-l", f"{self.folder}/log", "-w", "start")

    def kill(self) -> None:
        """SIGKILL to its first process; the others end when they see that."""
        number = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(number, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{number}").exists(), 30, "PostgreSQL is gone")

    def rows(self, query: str) -> list[list[str]]:
        """The rows of a query, as text."""
        words = ("--host", str(self.folder), "-d", "mlflow", "--no-align", "--tuples-only", "-F", "\t", "-c", query)
        return [line.split("\t") for line in self._run("psql", *words).splitlines()]


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[PostgreSQL]:
    folder = Path(f"/tmp/trainer-postgresql-{os.getpid()}")  # a socket's path is short; tmp_path is for root alone
    folder.mkdir(mode=0o700)
    found = PostgreSQL(folder)
    yield found
    found._run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")
    shutil.rmtree(folder)


@pytest.mark.engines
def test_runs_of_a_database_that_is_killed_have_each_point_once(postgresql: PostgreSQL, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.store = postgresql.address
    server.start()
    words = [
        "+recipe=digits_lenet",
        f"max_steps={STEPS}",
        "execution.log_every=2",
        "execution.threads=1",
        f"tracking.uri=http://127.0.0.1:{server.port}",
    ]
    folders = [tmp_path / f"run{number}" for number in range(RUNS)]
    with (tmp_path / "lines").open("w") as lines:
        processes = [
            zygote().start(
                [*words, f"hydra.run.dir={folder}", f"seed={number}"],
                tmp_path,
                environment(),
                lines.fileno(),
                lines.fileno(),
            )
            for number, folder in enumerate(folders)
        ]
        wait_for(lambda: int(postgresql.rows("SELECT count(*) FROM metrics")[0][0]) > 2000, 300, "the runs log")
        postgresql.kill()
        time.sleep(3)
        postgresql.start()
        codes = [process.wait(600) for process in processes]
    assert codes == [0] * RUNS, (tmp_path / "lines").read_text()[-3000:]
    for folder in folders:
        ((run, status),) = postgresql.rows(
            "SELECT run_uuid, status FROM runs JOIN tags USING (run_uuid) "
            f"WHERE key = 'trainer.run_dir' AND tags.value = '{folder}'"
        )
        assert status == "FINISHED"
        logged = postgresql.rows(f"SELECT key, step FROM metrics WHERE run_uuid = '{run}'")
        points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        written = [[key, str(point["step"])] for point in points for key in point["metrics"]]
        assert len(written) > STEPS and sorted(logged) == sorted(written), "each point once"
    server.kill()
