"""Lists, shows, verifies, compares, exports and fetches a run's checkpoints, for ``python -m trainer.checkpoints``."""
