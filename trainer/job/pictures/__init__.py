"""The pictures that a run draws at its end: curves, confusion matrix, mistakes, servers."""
