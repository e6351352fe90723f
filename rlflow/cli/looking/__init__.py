"""What a run records, and commands that look at what it has left, or leaves just now."""
