"""The project's own models. Any other model is one YAML file with its _target_."""
