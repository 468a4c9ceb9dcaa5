"""Every key once, and what is made of config nodes; secrets are found and hidden here."""
