"""Options that are no file of ours, and that a library has by name: ``optimizer=nadam``, ``model=resnet34``.

The libraries' sources are read; importing them takes seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

FOLDERS = {"optimizer": ("torch", "optim"), "model": ("torchvision", "models")}
"""Package and folder of what ``optimizer=torch optimizer.name=NAME`` and ``model=torchvision model.name=NAME`` take."""
DEFINED = {"optimizer": r"^class (NAME)\(.*\bOptimizer\)", "model": r"^@register_model\(.*\n(?:@.*\n)*def (NAME)\("}


def typed_for(group: str, name: str) -> str:
    """What to type for an option of a library; '' if it has none of this name."""
    if group not in FOLDERS or not name.isidentifier():
        return ""
    package, folder = FOLDERS[group]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    pattern = re.compile(DEFINED[group].replace("NAME", re.escape(name)), re.MULTILINE | re.IGNORECASE)
    for file in sorted((Path(spec.origin).parent / folder).glob("*.py")):
        if found := pattern.search(file.read_text(encoding="utf-8", errors="replace")):
            return f"{group}={package} {group}.name={found[1]}"
    return ""
