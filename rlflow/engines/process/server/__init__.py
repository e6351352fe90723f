"""What runs in the interpreter of an engine: scripts, and the package that they start from."""
