"""The forward of a packed batch: attention, kernels, the distribution over the vocabulary."""
