"""From a config to a plan or a refusal, without torch."""
