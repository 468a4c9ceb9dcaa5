"""Conformance of every strategy with the contract of trainer/strategies/contract.py, with real processes."""
