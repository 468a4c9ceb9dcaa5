"""The tests, as a package: processes that a test starts import their entries from it."""
