"""Seconds and bytes of an action: measured by an earlier run, else by roofline."""
