"""What a run draws: curves, confusion, mistakes, servers."""
