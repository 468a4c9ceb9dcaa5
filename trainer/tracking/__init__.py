"""Sends a run's metrics from its own files to MLflow, in a separate process (recorder.py)."""
