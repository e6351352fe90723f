"""Instances that are engines in processes of their own: what they may be, hold and cost."""
