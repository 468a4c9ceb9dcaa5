"""The command line: turns flags, overrides and configs into jobs, and mistakes into one-sentence errors."""
