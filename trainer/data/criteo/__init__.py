"""Click logs in Criteo's format."""
