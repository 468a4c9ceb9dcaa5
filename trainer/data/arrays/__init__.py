"""Data sets that are held in memory and read a whole batch at a time."""
