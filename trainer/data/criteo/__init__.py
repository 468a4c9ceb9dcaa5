"""data=criteo and data=synthetic_criteo: click logs in Criteo's text format."""
