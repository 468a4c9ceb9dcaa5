"""Says what labels are: which loss, which metrics, what ``predict`` writes, which pictures."""
