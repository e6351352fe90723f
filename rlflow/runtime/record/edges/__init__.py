"""Recorded edges: rows that nodes made, as Parquet files beside the run, bit for bit."""
