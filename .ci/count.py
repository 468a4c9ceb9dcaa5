"""Counts what makes code hard to read: long files, long functions, texts as subscripts where a type could stand, and
names that tell a reader nothing.

    python .ci/count.py [--check]

``--check`` fails where a file of trainer/ is longer than it may be, or where there are more of the others than ``MOST``
allows; the numbers there only ever go down.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE, LONGEST_FUNCTION = 440, 72
MOST = {"files": 0, "functions": 0, "subscripts": 444, "of config": 21, "names": 0}
"""Files and functions that are longer, and subscripts such as ``answer["run_id"]``; of those, ``config["data"]`` and
the like. Of names, those in ``REFUSED_NAMES``."""
REFUSED_NAMES = {"told", "given", "taken", "look", "stands", "goes_by", "whose", "of_life", "mine"}
"""Names of functions, classes, parameters, attributes and variables that do not say what they hold or do; with
underscores around them as well."""
CONFIG = re.compile(r"\b(config|plan|chosen|facts|assignment|payload)\b")


def counts() -> dict[str, list[str]]:
    """What is too long, by kind, and where each text stands as a subscript."""
    found: dict[str, list[str]] = {kind: [] for kind in MOST}
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT)
        lines = len(text.splitlines())
        if lines > LONGEST_FILE:
            found["files"].append(f"{name}: {lines} lines")
        tree = ast.parse(text)
        named = [(word, line) for word, line in names_in(tree) if word.strip("_").lower() in REFUSED_NAMES]
        found["names"] += [f"{name}:{line} {word}" for word, line in named]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                long = (node.end_lineno or node.lineno) - node.lineno + 1
                if long > LONGEST_FUNCTION:
                    found["functions"].append(f"{name}:{node.lineno} {node.name}: {long} lines")
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
            ):
                found["subscripts"].append(f"{name}:{node.lineno}")
                if CONFIG.search(ast.unparse(node.value)):
                    found["of config"].append(f"{name}:{node.lineno}")
    return found


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module gives to something, with its line: functions, classes, parameters, attributes of
    ``self``, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def main(arguments: list[str]) -> int:
    """See the module's text."""
    found, failed = counts(), 0
    for kind, places in found.items():
        more = len(places) - MOST[kind]
        failed |= more > 0
        print(f"{kind:12} {len(places):5}  at most {MOST[kind]}" + (f"  {more} TOO MANY" if more > 0 else ""))
        if kind in ("files", "functions") or more > 0:
            print("".join(f"    {place}\n" for place in places), end="")
    return int(failed and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
