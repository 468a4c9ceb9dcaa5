"""Saved weights: what files hold, and whether they fit a model."""
