"""``slowest.py JUNIT.xml``: the files of tests that take longest, in seconds of their processes."""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

SHOWN = 25


def main() -> None:
    """Print seconds, tests and name of each file."""
    seconds, tests = Counter[str](), Counter[str]()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.")
        seconds[file] += float(case.get("time", 0))  # type: ignore[assignment]
        tests[file] += 1
    print(f"{sum(seconds.values()):.0f} s in {sum(tests.values())} tests; the slowest files:")
    for file, spent in seconds.most_common(SHOWN):
        print(f"{spent:6.0f} s  {tests[file]:4d}  {file}")


if __name__ == "__main__":
    main()
