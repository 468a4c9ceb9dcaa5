"""docs/coming-from-paddle-fleet.md has every field of the reference's DistributedStrategy, and what it says can be
typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.composed import ready

HEADING = "## Each field of DistributedStrategy"
SECTION = (
    (Path(__file__).parents[2] / "docs" / "coming-from-paddle-fleet.md")
    .read_text()
    .partition(HEADING)[2]
    .partition("\n## ")[0]
)
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| `")]
FIELDS = yaml.safe_load(Path(__file__).with_name("distributed_strategy.yaml").read_text())
TYPED = [
    (re.findall(r"[\w.+]+=\[?[\w.*-]+\]?", code))
    for row in ROWS
    for code in re.findall(r"`([^`]+)`", row[1])
    if "=" in code
]
"""The keys of each piece of code on the right."""


def test_every_field_has_a_row_and_every_name_is_a_field() -> None:
    names = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]
    fields = {name for many in FIELDS.values() for name in many}
    assert fields - {name.rpartition(".")[2] for name in names} == set()
    for name in names:
        holder, _, field = name.rpartition(".")
        assert field in (FIELDS[holder] if holder else fields), name
    for holder, many in FIELDS.items():  # a name that several configs have is named with its config
        for field in many:
            shared = sum(field in other for other in FIELDS.values()) > 1
            assert not shared or f"{holder}.{field}" in names or field in names, f"{holder}.{field}"


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_what_is_on_the_right_can_be_typed(typed: list[str]) -> None:
    if any("pserver" in word for word in typed):
        run = ["+recipe=wide_and_deep", "launch.servers=1", "launch.workers=2"]
    else:
        chosen = [] if any(word.startswith("strategy=") for word in typed) else ["strategy=collective"]
        run = ["+recipe=resnet50_random", "model=resnet18", "launch.nproc=8", "data.batch_size=256", *chosen]
    ready(*run, "plan=true", *typed)
