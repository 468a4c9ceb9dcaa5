"""Reference flowers come in the archive's order, or in one fixed shuffle which is said; never class by class."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from trainer.config.schema import EmbeddedFlowersData, Flowers102Data
from trainer.data.images.listing import Listing
from trainer.data.sets.flowers import EmbeddedFlowers, Flowers102


@pytest.mark.parametrize(("kind", "declared", "said"), [(Flowers102, Flowers102Data, "102flowers.tgz is not there"), (EmbeddedFlowers, EmbeddedFlowersData, "drawn flowers have no archive")])  # fmt: skip
def test_without_the_archive_there_is_one_fixed_shuffle(kind: type, declared: type, said: str, tmp_path: Path) -> None:
    options = {key: value for key, value in asdict(declared()).items() if key != "root"}
    by_class = Listing.of_files([f"{n}.jpg" for n in range(1020)], np.repeat(np.arange(102), 10))
    source = kind(**options, root=str(tmp_path)) if kind is Flowers102 else kind(**options)
    assert source._ordered(by_class, "embedded") is by_class and source._shuffled() == "", "the default"
    options["order"] = "archive"
    first, again = (kind(**options, **({"root": str(tmp_path)} if kind is Flowers102 else {}))._ordered(by_class, "embedded") for _ in range(2))  # fmt: skip
    assert len(set(first.labels[:32].tolist())) > 20 and sorted(first.labels.tolist()) == by_class.labels.tolist()
    assert first.labels.tolist() == again.labels.tolist()
    assert [int(first.files[f].removesuffix(".jpg")) // 10 for f in first.file] == first.labels.tolist()
    source.options.order = "archive"
    assert said in source._shuffled() and "one fixed shuffle" in source._shuffled()
