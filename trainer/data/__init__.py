"""Datasets, and how batches of them reach the training loop."""
