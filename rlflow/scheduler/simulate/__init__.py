"""A plan on a virtual clock, and what is read off it."""
