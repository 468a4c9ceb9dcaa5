"""The command ``python -m trainer.checkpoints``: lists and compares a run's checkpoints, and exports their models."""
