"""Folders that are complete or do not exist, and the checkpoints that a run keeps in them."""
