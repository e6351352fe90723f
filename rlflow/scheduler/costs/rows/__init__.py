"""Rows that estimates count with: how many, how long, said or assumed, and the line of it."""
