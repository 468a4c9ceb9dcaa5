"""How the workers' gradients become shared parameters: one contract (contract.py), what each strategy declares
(builtin.py), one file per strategy."""
