"""What happens to training samples between file and batch, all from (seed, epoch, sample)."""
