"""Submitters: each file hands the command to one engine (Slurm, Kubernetes, Ray, MPI)."""
