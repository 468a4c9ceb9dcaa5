"""The files of a run (metrics.jsonl, status.json, tables), and how those of an earlier run are cleared."""
