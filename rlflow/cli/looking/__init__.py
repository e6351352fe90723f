"""Commands that look at what a run has left, or leaves just now."""
