"""Downloads files over https, whose checksums are known in advance."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from trainer.host.files import replacing

PATIENCE_S = 3
STALLED_S = 60
PIECE = 1 << 20


class _HttpsAlone(urllib.request.HTTPRedirectHandler):
    """Follows redirections to https addresses only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://"):
            raise urllib.error.URLError(f"it leads to {newurl.partition(':')[0]}, and only https is used")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(address: str, timeout: float, method: str = "GET") -> Any:
    if not address.startswith("https://"):
        raise urllib.error.URLError(f"{address} is no https address")
    request = urllib.request.Request(address, method=method, headers={"User-Agent": "trainer"})
    return urllib.request.build_opener(_HttpsAlone).open(request, timeout=timeout)


def unreachable(address: str) -> str:
    """Return why nothing can be fetched over https from an address, or '' if its site answers."""
    try:
        with _open(address, PATIENCE_S, "HEAD"):
            return ""
    except OSError as error:
        return f"no answer from its site: {getattr(error, 'reason', error)}"


def fetch_file(address: str, path: Path, size: int, sha256: str) -> None:
    """Download a file unless it exists with that size and SHA-256; it appears complete and correct, or not at all.

    Raises:
        OSError: the download failed, or the file has another checksum.
    """
    if path.is_file() and path.stat().st_size == size and _digest(path) == sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        with part.open("wb") as file, _open(address, STALLED_S) as response:
            got = 0
            while piece := response.read(PIECE):
                got += len(piece)
                if got > size:
                    break
                file.write(piece)
        if got != size or _digest(part) != sha256:
            raise OSError(
                f"what {address} sent is not the file that it should be (its SHA-256 or length differs); it "
                f"was thrown away"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
