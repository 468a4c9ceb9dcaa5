"""Images of any size in files: which there are, what they hold, how they are decoded and kept."""
