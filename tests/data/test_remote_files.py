"""Data at addresses: copied once, whole or not at all, by one process of several; secrets are not shown."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import trainer
from tests.runs import environment, points
from trainer.data.remote_files import found_by, local_folder, local_path, public
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.shards import Shards
from trainer.data.sets.table import Table
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Folders of classes below images/, with a table and two shards of the same images."""
    root, random = tmp_path / "images", np.random.default_rng(0)
    rows = ["image,label"]
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for n in range(8):
            path = root / name / f"{n}.png"
            Image.fromarray(random.integers(0, 255, (36, 40, 3), dtype=np.uint8)).save(path)
            rows.append(f"{name}/{n}.png,{name}")
    (root / "table.csv").write_text("\n".join(rows) + "\n")
    for half in (0, 1):
        with tarfile.open(root / f"part-{half}.tar", "w") as shard:
            for label, name in enumerate(("cat", "dog")):
                (tmp_path / "label").write_text(str(label))
                for n in range(half, 8, 2):
                    shard.add(root / name / f"{n}.png", f"{name}{n}.png")
                    shard.add(tmp_path / "label", f"{name}{n}.cls")
    return root


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, says an ETag of size and time, and remembers which files were fetched."""

    fetched: list[str] = []
    cut: set[str] = set()

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        super().end_headers()

    def do_GET(self) -> None:
        Server.fetched.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        if Path(self.path).name in Server.cut:
            outputfile.write(source.read(10))
            return
        super().copyfile(source, outputfile)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(images: Path) -> Iterator[str]:
    """The address of a web server with the images."""
    Server.fetched, Server.cut = [], set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(images)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def in_memory(images: Path) -> str:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.put(str(images), "/bucket/images", recursive=True)
    return "memory://bucket/images"


@pytest.mark.parametrize("place", ["memory", "file"])
def test_folders_tables_and_shards_at_an_address_are_those_of_the_folder(images: Path, place: str) -> None:
    address = in_memory(images) if place == "memory" else f"file://{images}"
    size = {"image_size": 16, "cache": "none"}
    for local, remote in (
        (ImageFolder(root=str(images), **size), ImageFolder(root=address, **size)),
        (Table(path=str(images / "table.csv"), **size), Table(path=f"{address}/table.csv", **size)),
        (Shards(path=f"{images}/part-{{0..1}}.tar", **size), Shards(path=f"{address}/part-{{0..1}}.tar", **size)),
        (Shards(path=f"{images}/part-*.tar", **size), Shards(path=f"{address}/part-*.tar", **size)),
    ):
        facts = local.facts(4)
        assert remote.facts(4).sizes == facts.sizes
        one, other = local.open(facts).train, remote.open(facts).train
        assert one.labels.tolist() == other.labels.tolist()
        assert all((one.image(n) == other.image(n)).all() for n in range(len(one)))


def test_a_run_on_a_web_site_has_the_losses_of_the_folder(images: Path, site: str, tmp_path: Path) -> None:
    small = ("model=convnet", "tracking=none", "epochs=1", "data.batch_size=4", "data.image_size=32", "data=table")
    losses = []
    for name, path in (("local", f"{images}/table.csv"), ("remote", f"{site}/table.csv")):
        run = tmp_path / name
        trainer.run([*small, f"data.path={path}", "execution.log_every=1", "device=cpu", f"hydra.run.dir={run}"])
        losses.append(points(run, "train/loss"))
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert len(Server.fetched) == len(set(Server.fetched)) == 17, "the table and 16 images, each once"


def test_a_file_is_copied_again_when_it_has_changed_and_only_then(images: Path, site: str) -> None:
    first = local_path(f"{site}/table.csv", "data.path")
    assert local_path(f"{site}/table.csv", "data.path") == first and Server.fetched == ["/table.csv"]
    (images / "table.csv").write_text("image,label\n")
    second = local_path(f"{site}/table.csv", "data.path")
    assert second != first and Path(second).read_text() == "image,label\n" and len(Server.fetched) == 2
    assert Path(first).read_text().startswith("image,label\ncat/0.png"), "a run that reads the copy keeps it"


def test_a_download_that_was_cut_short_is_never_taken_as_whole(images: Path, site: str, cache: Path) -> None:
    Server.cut = {"1.png"}
    names = ["cat/0.png", "cat/1.png"]
    with pytest.raises(UserError) as caught:
        local_folder(site, "data.root", names)
    assert site in caught.value.what
    assert not list((cache / "remote" / "views").glob("*/cat")) and not list(cache.rglob("*part-*"))
    Server.cut = set()
    view = Path(local_folder(site, "data.root", names))
    assert all((view / name).read_bytes() == (images / name).read_bytes() for name in names)


def test_two_processes_copy_a_folder_once(images: Path, site: str, tmp_path: Path) -> None:
    code = (
        "import sys; from trainer.data.remote_files import local_folder; "
        "print(local_folder(sys.argv[1], 'data.root', [f'cat/{n}.png' for n in range(8)]))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, site], env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    views = {process.communicate(timeout=300)[0].splitlines()[-1] for process in both}
    assert len(views) == 1 and [process.returncode for process in both] == [0, 0]
    assert sorted(Server.fetched) == [f"/cat/{n}.png" for n in range(8)]


def test_a_site_that_is_down_leaves_the_copy(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = in_memory(images)
    view = local_folder(address, "data.root")

    def down(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.find", down)
    assert local_folder(address, "data.root") == view
    with pytest.raises(UserError, match="no route to host"):
        local_folder(f"{address}/cat", "data.root")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:hush@site/t.csv", "https://site/t.csv"),
        ("https://site/t.csv?X-Amz-Signature=hush", "https://site/t.csv"),
        ("s3://bucket/t.csv", "s3://bucket/t.csv"),
    ],
)
def test_secrets_of_an_address_are_not_shown(address: str, shown: str) -> None:
    assert public(address) == shown


def test_messages_about_an_address_hide_its_secrets(site: str, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    local_path(f"{site}/table.csv?token=hush", "data.path")
    with pytest.raises(UserError) as caught:
        local_path("http://me:hush@127.0.0.1:1/t.csv?token=hush", "data.path")
    out = capfd.readouterr()
    assert "hush" not in f"{caught.value} {out.out} {out.err}" and "copying 1 file" in out.out
    for path in cache.rglob("*"):
        assert "hush" not in path.name and not (path.is_file() and b"hush" in path.read_bytes())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("memory://bucket/none/t.csv", "there is no such file"),
        ("nonsense://bucket/t.csv", "Protocol not known"),
        ("memory://bucket/*/part-0.tar", "no pattern"),
    ],
)
def test_what_is_not_there_is_refused(address: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        found_by([address], "data.path") if "*" in address else local_path(address, "data.path")
    assert why in caught.value.why
