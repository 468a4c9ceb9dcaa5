"""Augmentation of training samples, whose random numbers follow from (seed, epoch, sample)."""
