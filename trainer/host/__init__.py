"""This machine: its hardware, its network, and files that other users of it cannot reach into."""
