"""The launchers, with real processes that raise, exit, and are killed."""
