"""What the forkserver of the testing processes imports once, for all processes that it forks."""

from __future__ import annotations

import importlib

from tests.huge_pages import use_huge_pages

MODULES = ("trainer.launch.forkserver", "trainer.worker.train", "torch._dynamo", "tests.strategies.entries")

for module in MODULES:
    importlib.import_module(module)
use_huge_pages()
