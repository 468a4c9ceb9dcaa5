"""Data sets that lie in memory, read a whole batch at a time."""
