"""This machine: hardware, network, and files that other users cannot tamper with."""
