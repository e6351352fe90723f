"""Graphs and plans as pictures."""
