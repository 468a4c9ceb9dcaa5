"""Data sets, and how their batches reach the training loop."""
