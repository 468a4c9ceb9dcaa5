"""Command lines in this process, as for the tests of refusals."""

from tests.cli.conftest import folder, logging_restored, run

__all__ = ["folder", "logging_restored", "run"]
