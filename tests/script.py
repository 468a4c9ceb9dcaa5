"""Runs the code that is its first argument, as ``python -c`` does, where ``python -m`` starts
(:func:`tests.runs.script`)."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
