"""Optimizers, learning-rate schedules, and the updater that applies them."""
