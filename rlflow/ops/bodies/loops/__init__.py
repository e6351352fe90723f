"""Bodies of loops, episodes and curricula."""
