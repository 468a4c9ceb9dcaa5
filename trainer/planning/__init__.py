"""Turns a config into a plan or a refusal, without torch."""
