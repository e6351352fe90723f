"""The operators that repeat a part of a graph: loops, episodes, curricula."""
