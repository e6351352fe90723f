"""Weights on their way into a model: skeletons, names, slices of files, random numbers."""
