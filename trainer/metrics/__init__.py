"""Measures a model as sums that add up exactly over workers."""
