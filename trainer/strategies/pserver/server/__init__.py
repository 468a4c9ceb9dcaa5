"""A server process: its share of the parameters, and the rules of each mode."""
