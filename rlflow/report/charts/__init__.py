"""Curves and timelines as pictures."""
