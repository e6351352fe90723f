"""Rows that an engine answers."""
