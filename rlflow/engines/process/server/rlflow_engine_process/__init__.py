"""An engine behind a socket; it needs nothing of rlflow, and imports an engine where it starts."""
