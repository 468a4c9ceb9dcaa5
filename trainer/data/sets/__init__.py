"""The built-in data sets, one file each."""
