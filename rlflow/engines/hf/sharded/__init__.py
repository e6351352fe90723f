"""Models that several ranks hold and compute together."""
