"""Bodies of a user's own ops."""
