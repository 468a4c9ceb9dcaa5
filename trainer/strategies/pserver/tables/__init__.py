"""Stores and updates the rows of embedding tables, in servers and in workers' replicas."""
