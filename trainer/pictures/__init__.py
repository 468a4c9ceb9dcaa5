"""Makes figures of matplotlib, and fits texts into them."""
