"""The command ``python -m trainer.checkpoints``: looks at the checkpoints of a run, and exports their models."""
