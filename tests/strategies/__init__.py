"""Conformance of every strategy with the contract of trainer/strategies/base.py, with real processes."""
