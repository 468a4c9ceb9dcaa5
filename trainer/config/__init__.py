"""The config: declares every key once, instantiates ``_target_`` nodes, and finds and hides secrets."""
