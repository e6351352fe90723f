"""What scripts and shells get of every command: JSON, and completion."""
