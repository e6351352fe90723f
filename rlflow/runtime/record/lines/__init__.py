"""Lines of what happens while a run goes on: files that stay small, and the clock of their times."""
