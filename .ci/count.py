"""Counts what makes code hard to read: long files, long functions, and texts as subscripts where a type could stand.

    python .ci/count.py [--check]

``--check`` fails where a file of trainer/ is longer than it may be, or where there are more of the others than ``MOST``
allows; the numbers there only ever go down.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE, LONGEST_FUNCTION = 440, 72
MOST = {"files": 0, "functions": 0, "subscripts": 392, "of config": 21}
"""Files and functions that are longer, and subscripts such as ``answer["run_id"]``; of those, ``config["data"]`` and
the like."""
CONFIG = re.compile(r"\b(config|plan|chosen|facts|assignment|payload)\b")


def counts() -> dict[str, list[str]]:
    """What is too long, by kind, and where each text stands as a subscript."""
    found: dict[str, list[str]] = {kind: [] for kind in MOST}
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT)
        lines = len(text.splitlines())
        if lines > LONGEST_FILE:
            found["files"].append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
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


def main(arguments: list[str]) -> int:
    """See the module's text."""
    found, failed = counts(), 0
    for kind, places in found.items():
        more = len(places) - MOST[kind]
        failed |= more > 0
        print(f"{kind:12} {len(places):5}  at most {MOST[kind]}" + (f"  {more} TOO MANY" if more > 0 else ""))
        if kind in ("files", "functions"):
            print("".join(f"    {place}\n" for place in places), end="")
    return int(failed and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
