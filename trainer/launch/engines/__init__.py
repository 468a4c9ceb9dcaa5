"""Submitters: each file hands the command to one engine (Slurm, Kubernetes, Ray, MPI), which runs it on its machines."""
