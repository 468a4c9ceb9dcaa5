"""The data sets by name."""
