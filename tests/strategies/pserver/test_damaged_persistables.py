"""Persistables that somebody has sealed, and that no server could start from, are refused before the start, with the
file's name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.checkpoint import durable_folder, streamed
from trainer.errors import UserError
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.server import saved_state_checks

META: dict[str, Any] = {
    "tables": {},
    "dense": [{"name": "p", "start": 0, "stop": 3}],
    "mode": "async",
    "optimizer": "SGD (nothing)",
    "dtype": "float32",
    "evict_by": "steps",
    "age": 3,
    "version": 3,
    "updates": 3,
    "updates_per_step": 1,
    "numbers": {},
}


def saved(folder: Path, meta: dict[str, Any]) -> Path:
    written = snapshot.begin(folder, 0)
    snapshot.write_part(written, 0, {"p": streamed.of(np.zeros(3, np.float32))}, meta)
    snapshot.complete(written, 1, folder)
    return folder


def refused(folder: Path) -> str:
    declared: Any = SimpleNamespace(options=SimpleNamespace(load_from=str(folder)), mode="geo")
    nothing: Any = None
    [error] = saved_state_checks.refuse(nothing, declared, nothing, nothing)
    return f"{error.what}: {error.why}"


@pytest.mark.parametrize("key", ["age", "version", "updates", "updates_per_step", "numbers"])
@pytest.mark.parametrize("value", [None, "much", [1], -1, True, "left out"])
def test_part_that_lacks_or_garbles_a_number_is_named(key: str, value: Any, tmp_path: Path) -> None:
    meta = {name: told for name, told in {**META, key: value}.items() if told != "left out"}
    why = refused(saved(tmp_path / "kept", meta))
    assert why.startswith(
        f"strategy.load_from={tmp_path / 'kept'}: {tmp_path / 'kept' / 'server-0.safetensors'}: its meta "
    )
    assert key in why


def test_whole_part_is_no_damage(tmp_path: Path) -> None:
    assert "saved it, and in pserver_geo" in refused(saved(tmp_path / "kept", META))


@pytest.mark.parametrize(
    "index",
    [
        "[" * 200_000,
        "[]",
        "{}",
        '{"servers": 100000000, "tables": {}, "dense": [], "meta": {}}',
        '{"servers": 0, "tables": {}, "dense": [], "meta": {}}',
        '{"servers": 1, "tables": {"t": 1}, "dense": [], "meta": {}}',
        '{"servers": 1, "tables": {}, "dense": [{}], "meta": {}}',
    ],
)
def test_sealed_index_that_makes_no_sense_is_named(index: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "kept", META)
    durable_folder.write(written := tmp_path / "other", snapshot.INDEX, lambda path: path.write_text(index))
    durable_folder.write(
        written, "server-0.safetensors", lambda path: path.write_bytes((folder / "server-0.safetensors").read_bytes())
    )
    durable_folder.complete(written, [snapshot.INDEX, "server-0.safetensors"], snapshot.FORMAT)
    with pytest.raises(UserError, match=r"index\.json"):
        snapshot.read(written)
    assert json.loads((written / "COMPLETE").read_text())["files"]
