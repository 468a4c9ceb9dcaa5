"""What Paddle has saved is refused by name, with how its arrays can be brought here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.planning.eval_and_predict import weights_file


@pytest.mark.parametrize(
    "name", ["best.pdparams", "best.pdopt", "inference.pdmodel", "inference.pdiparams", "__model__"]
)
@pytest.mark.parametrize("folder", [False, True])
def test_they_are_refused(name: str, folder: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"saved by Paddle, whose files are not read; safetensors.*FILE.safetensors"):
        weights_file(tmp_path if folder else tmp_path / name)
