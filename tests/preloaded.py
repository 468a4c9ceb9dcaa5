"""What the forkserver of the testing processes imports once, for all processes that it forks."""

from __future__ import annotations

import gc
import importlib

from tests.importing import import_all_of

for module in ("trainer.launch.forkserver", "torch._dynamo", "numpy.ma", "tests.strategies.entries"):
    importlib.import_module(module)
for package in ("trainer.data", "trainer.strategies", "trainer.worker"):
    import_all_of(package)
gc.collect()
gc.freeze()
