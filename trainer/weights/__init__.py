"""Reads saved weights, and checks whether they fit a model."""
