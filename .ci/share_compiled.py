"""share_compiled.py ENVIRONMENT: link what is compiled of this environment's packages into another environment.

uv links the files of packages from its cache, so both environments have the same ones, and Python takes what was
compiled of one for the other (by size and time of the source). Else a first training compiles PyTorch, which takes
longer than to train.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    ours = Path(sysconfig.get_path("purelib"))
    theirs = Path(sys.argv[1]).resolve() / ours.relative_to(sys.prefix)
    for compiled in ours.rglob("__pycache__"):
        there = theirs / compiled.relative_to(ours)
        if there.parent.is_dir():
            shutil.copytree(compiled, there, copy_function=_link, dirs_exist_ok=True)


def _link(compiled: str, there: str) -> None:
    if not os.path.exists(there):
        try:
            os.link(compiled, there)
        except OSError:  # another disk: Python compiles anew
            pass


if __name__ == "__main__":
    main()
