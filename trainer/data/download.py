"""Downloads data sets: checks whether their site answers, and words the warning or refusal if it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import ArraysData, Flowers102Data
from trainer.errors import UserError
from trainer.host.https import fetch_file, unreachable


@dataclass(frozen=True)
class File:
    """A file of a downloadable data set: its name, and the size and checksum that it must have."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Site:
    """A web site that a data set is fetched from, and its files.

    Attributes:
        name: of the set; address: of the folder that holds its files, over https.
        folder: where torchvision looks for them, below ``data.root``.
        files: with their checksums, which are known beforehand: torchvision's own are MD5, and it tries http where https fails.
    """

    name: str
    address: str
    folder: str
    files: tuple[File, ...]

    @property
    def megabytes(self) -> int:
        """Megabytes that a download from this site takes."""
        return round(sum(file.size for file in self.files) / 1e6)

    def stand_in(self, reason: str, instead: str) -> str:
        """Return the warning that other data replace this data set."""
        return (
            f"this is NOT {self.name}, which is not there and cannot be had ({reason}). {instead} instead; "
            "data.on_missing=error refuses, data.root=FOLDER uses yours."
        )


def absent(options: Flowers102Data | ArraysData, site: Site, folder: Path) -> str:
    """Return why a data set that is not in its folder cannot be downloaded, or '' if it can.

    Raises:
        UserError: it cannot, and ``data.on_missing`` is ``error``.
    """
    reason = unreachable(site.address + site.files[-1].name) if options.download else "data.download=false"
    if reason and options.on_missing == "error":
        raise UserError(
            f"data.root={options.root}",
            f"{site.name} is not in {folder} and cannot be downloaded ({reason})",
            f"data.root=FOLDER that holds {folder.name}/, or data.on_missing=embedded",
        )
    return reason


def fetch(options: Flowers102Data | ArraysData, site: Site, unpack: Callable[[str], object]) -> str:
    """Download a data set into its folder, one process at a time. Returns why that failed, or ''.

    Args:
        unpack: torchvision's loader, which finds the files that it would download.

    Raises:
        UserError: it failed, and ``data.on_missing`` is ``error``.
    """
    from filelock import FileLock

    root = Path(options.root)
    root.mkdir(parents=True, exist_ok=True)
    print(f"downloading {site.name} into {root} ({site.megabytes} MB)", flush=True)
    try:
        with FileLock(root / f".{site.name.lower().replace(' ', '-')}.lock"):
            for file in site.files:
                fetch_file(site.address + file.name, root / site.folder / file.name, file.size, file.sha256)
            unpack(str(root))
    except (OSError, RuntimeError) as error:
        reason = f"the download broke: {error}"
        if options.on_missing == "error":
            raise UserError(f"data.root={root}", reason, "data.on_missing=embedded") from error
        return reason
    return ""
