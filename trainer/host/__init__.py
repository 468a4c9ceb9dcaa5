"""This machine: folders and files that other users of it cannot reach into."""
