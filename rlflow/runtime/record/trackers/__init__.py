"""Trackers of experiments: what each is sent of a run, behind an observer that never holds it."""
