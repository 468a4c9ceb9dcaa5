"""Rows of embedding tables, for servers and for replicas in workers: where they lie, how they change."""
