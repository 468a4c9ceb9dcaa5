"""What the user types: flags, overrides and configs become jobs; what is wrong becomes a sentence."""
