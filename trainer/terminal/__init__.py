"""What the terminal shows: clean streams, one console, the progress bar."""
