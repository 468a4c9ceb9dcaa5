"""Folders that are there whole or not at all, and what a run keeps in them to go on from."""
