"""Recorded edges used again: the rows that a plan reads, and what must be there of them."""
