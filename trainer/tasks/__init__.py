"""Tasks: what labels are, which loss, which metrics, what ``predict`` writes, which pictures a run leaves."""
