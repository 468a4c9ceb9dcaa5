"""How fast rows in Criteo's format are read, against how fast a worker trains on them. One core for each.

    python benchmarks/reading.py [--rows 200000] [--rounds 5]

Reading and training alternate; medians. The trainer is the shortest loop over Wide & Deep with batches in memory.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer.data.criteo.blocks import SplitRows
from trainer.data.criteo.row_stream import CriteoBlocks
from trainer.data.criteo.source import Criteo
from trainer.data.criteo.teacher import Teacher, write
from trainer.models.embedding_tables import materialise
from trainer.models.wide_and_deep import WideAndDeep

BATCH, SIZE = 512, 1_000_001


def streamed(path: Path) -> Callable[[], int]:
    """Read the text, as with data.cache=false."""
    blocks = CriteoBlocks([path], SIZE, SplitRows(), 16 << 20, 0.01)
    return lambda: sum(len(labels) for b in range(blocks.blocks()) for _, labels in blocks.read_chunks(b))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "rows.txt", Path(folder) / "rows.txt.gz"
        with plain.open("wb") as file:
            write(file, Teacher(0).draw(arguments.rows, np.random.default_rng(0)))
        packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
        config = {
            "path": str(plain),
            "val_path": str(plain),
            "val_fraction": 0.1,
            "hash_size": SIZE,
            "cache_dir": folder,
            "cache": True,
            "max_bad_fraction": 0.01,
        }
        source = Criteo(**config, block_mib=16)
        facts = source.prepare(source.facts(BATCH), lambda *_: None)
        arrays: Any = source.open(facts).train
        order = np.random.default_rng(1).permutation(facts.train_samples)
        batches = [arrays.batch(order[i : i + BATCH]) for i in range(0, 100 * BATCH, BATCH)]
        model = WideAndDeep(SIZE)
        materialise(model, 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def cached() -> int:
            return sum(len(arrays.batch(order[i : i + BATCH])[1]) for i in range(0, len(order), BATCH))

        def trained() -> int:
            for inputs, labels in batches:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(model(inputs), labels.float()).backward()
                optimizer.step()
            return len(batches) * BATCH

        jobs = {"text": streamed(plain), ".gz": streamed(packed), "arrays, shuffled": cached, "training": trained}
        rates: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(arguments.rounds):
            for name, job in jobs.items():
                began = time.perf_counter()
                rates[name].append(job() / (time.perf_counter() - began))
    training = statistics.median(rates["training"])
    for name, found in rates.items():
        rate = statistics.median(found)
        print(f"{name}: {rate:,.0f} rows/s, {rate / training:.1f} of training ({min(found):,.0f}-{max(found):,.0f})")


if __name__ == "__main__":
    main()
