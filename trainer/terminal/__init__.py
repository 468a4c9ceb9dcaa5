"""The terminal: clean streams, one console, the progress bar."""
