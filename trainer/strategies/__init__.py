"""How the workers' gradients become shared parameters: one contract (base.py), one file per strategy."""
