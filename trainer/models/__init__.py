"""The project's own models; any other is one YAML with its _target_."""
