"""The bodies of the operators: torch lives here. Looked up by name where they run."""
