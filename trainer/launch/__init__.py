"""From the plan to processes."""
