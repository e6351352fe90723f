"""Samples of a run as it has recorded them: joined, filtered, sorted, as text and as a page."""
