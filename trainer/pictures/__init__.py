"""Figures of matplotlib, and texts that fit into them: used by whatever draws a picture of a run."""
