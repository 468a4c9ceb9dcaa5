"""The files of a run: metrics.jsonl, status.json, tables, and how an earlier run's are cleared."""
