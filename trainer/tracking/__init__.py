"""Metrics go to the run's own files first; a separate process (recorder.py) carries them to MLflow."""
