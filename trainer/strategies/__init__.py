"""Strategies, which turn the workers' gradients into shared parameters.
One contract (contract.py), declarations (builtin.py), and one file per strategy."""
