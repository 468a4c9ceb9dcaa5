"""What is downloaded comes over https, and is the file that was expected, or nothing is left of it."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torchvision.datasets import CIFAR10, MNIST, Flowers102

from trainer.config.schema import ArraysData, TrackingConfig
from trainer.data.download import File, Site, fetch
from trainer.data.sets import cifar, flowers, mnist
from trainer.errors import UserError
from trainer.host.https import fetch_file, unreachable

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Answers(BaseHTTPRequestHandler):
    """A site: /good and /long send bytes, /leads/ADDRESS leads there."""

    def do_GET(self) -> None:
        if self.path.startswith("/leads/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/leads/"))
            self.end_headers()
            return
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        body = CONTENT * 100 if self.path == "/long" else CONTENT
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(b"" if self.command == "HEAD" else body)
        except OSError:  # the other side has seen enough
            pass

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Quietly."""


def serving(server: ThreadingHTTPServer) -> ThreadingHTTPServer:
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[str]]]:
    """The addresses of a site with https and of one without, and what the second was asked for."""
    folder = tmp_path_factory.mktemp("certificate")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(*plain))
    safe, unsafe = (ThreadingHTTPServer(("127.0.0.1", 0), Answers) for _ in range(2))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    safe.socket = context.wrap_socket(safe.socket, server_side=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
        serving(safe), serving(unsafe)
        yield f"https://127.0.0.1:{safe.server_port}/", f"http://127.0.0.1:{unsafe.server_port}/", unsafe.asked  # type: ignore[attr-defined]
    for server in (safe, unsafe):
        server.shutdown()
        server.server_close()


def test_right_file_arrives_once(sites: tuple[str, str, list[str]], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    fetch_file(f"{sites[0]}good", path, len(CONTENT), SHA256)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    fetch_file("https://127.0.0.1:1/nobody", path, len(CONTENT), SHA256)  # it is there: nobody is asked


@pytest.mark.parametrize(("name", "sha256"), [("good", "0" * 64), ("long", SHA256)])
def test_another_file_leaves_nothing(sites: tuple[str, str, list[str]], tmp_path: Path, name: str, sha256: str) -> None:
    with pytest.raises(OSError, match="is not the file that it should be"):
        fetch_file(sites[0] + name, tmp_path / "file", len(CONTENT), sha256)
    assert list(tmp_path.iterdir()) == []


def test_file_that_somebody_left_under_the_name_is_fetched_anew(
    sites: tuple[str, str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(CONTENT[::-1])
    fetch_file(f"{sites[0]}good", tmp_path / "file", len(CONTENT), SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_nothing_is_asked_without_https(sites: tuple[str, str, list[str]], tmp_path: Path) -> None:
    safe, unsafe, asked = sites
    assert "is no https address" in unreachable(f"{unsafe}good")
    assert "leads to http, and only https is used" in unreachable(f"{safe}leads/{unsafe}good")
    for address in (f"{unsafe}good", f"{safe}leads/{unsafe}good", f"{safe}leads/file:///etc/passwd"):
        with pytest.raises(OSError, match=r"only https is used|is no https address|is not allowed"):
            fetch_file(address, tmp_path / "file", len(CONTENT), SHA256)
    assert asked == [] and list(tmp_path.iterdir()) == []
    assert unreachable(f"{safe}leads/{safe}good") == "" == unreachable(f"{safe}good")


def test_wrong_download_is_a_reason_or_a_refusal(sites: tuple[str, str, list[str]], tmp_path: Path) -> None:
    site = Site("A set", sites[0], "raw", (File("good", len(CONTENT), "0" * 64),))
    options = ArraysData(root=str(tmp_path))
    assert "is not the file that it should be" in fetch(options, site, lambda: False)
    with pytest.raises(UserError, match="the download broke"):
        fetch(replace(options, on_missing="error"), site, lambda: False)
    assert not (tmp_path / "raw" / "good").exists()


def test_files_are_those_that_torchvision_looks_for() -> None:
    assert [(f.name, mnist.SITE.folder) for f in mnist.SITE.files] == [
        (name, "MNIST/raw") for name, _ in MNIST.resources
    ]
    assert mnist.SITE.address == MNIST.mirrors[0]
    assert cifar.SITE.address + cifar.SITE.files[0].name == CIFAR10.url and cifar.SITE.files[0].name == CIFAR10.filename
    assert {f.name for f in flowers.SITE.files} == {name for name, _ in Flowers102._file_dict.values()}
    assert flowers.SITE.address == Flowers102._download_url_prefix
    for site in (mnist.SITE, cifar.SITE, flowers.SITE):
        assert site.address.startswith("https://") and all(len(f.sha256) == 64 for f in site.files)
    assert [site.megabytes for site in (mnist.SITE, cifar.SITE, flowers.SITE)] == [12, 170, 345]


def test_login_of_the_tracking_server_goes_to_no_other_server(sites: tuple[str, str, list[str]]) -> None:
    from trainer.planning.sqlite_store import Experiment
    from trainer.planning.tracking_store import try_store

    heard: list[str | None] = []

    class Listens(Answers):
        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            super().do_GET()

    other = serving(ThreadingHTTPServer(("127.0.0.1", 0), Listens))

    class Leads(BaseHTTPRequestHandler):
        log_message = Answers.log_message

        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{other.server_port}/")
            self.end_headers()

    first = serving(ThreadingHTTPServer(("127.0.0.1", 0), Leads))
    with pytest.raises(UserError, match="not as an MLflow server does"):
        try_store(
            TrackingConfig(trackers={"mlflow": {}}, uri=f"http://me:password@127.0.0.1:{first.server_port}"),
            Experiment("an experiment"),
        )
    for server in (first, other):
        server.shutdown()
        server.server_close()
    assert [h is not None for h in heard] == [True, False]
