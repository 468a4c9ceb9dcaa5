"""Whether torchcodec can decode JPEGs on the GPU here: its wheel for CUDA carries NVIDIA's decoder, NVJPEG."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

CUDA = re.compile(r"^cuda(?:: [^=]+)? = '(\d+)", re.MULTILINE)
LIBRARY = re.compile(r"libnvjpeg[^/]*\.so\.(\d+)")


def missing() -> str:
    """What this machine lacks to decode on a GPU, in words; empty: nothing. Torch is not imported."""
    torch, torchcodec = (_folder(name) for name in ("torch", "torchcodec"))
    if torch is None or torchcodec is None:
        return "torch or torchcodec is not installed"
    libraries = torchcodec.with_name("torchcodec.libs")
    carried = [LIBRARY.match(path.name) for path in libraries.glob("libnvjpeg*")] if libraries.is_dir() else []
    version = next((found[1] for found in carried if found), "")
    if not version:
        return "this wheel of torchcodec has no NVJPEG, which that for CUDA has"
    cuda = CUDA.search((torch / "version.py").read_text())
    if cuda is None:
        return "this torch is not built for CUDA"
    if cuda[1] != version:
        return f"torchcodec has NVJPEG for CUDA {version}, and torch is built for CUDA {cuda[1]}"
    return ""


def _folder(package: str) -> Path | None:
    found = find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent
