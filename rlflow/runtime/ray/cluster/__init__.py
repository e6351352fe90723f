"""Clusters of Ray: reached, watched, and left without a process behind."""
