"""Weights from one layout to another: what each rank lacks, from whom, and how it travels."""
