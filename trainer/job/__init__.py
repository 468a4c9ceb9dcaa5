"""Runs one job in the parent process: check, prepare the data, track, launch, record the end."""
