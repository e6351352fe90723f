"""Lines about a run while it goes on: files that stay small, and the clock of their times."""
