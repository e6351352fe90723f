"""Distributions over a vocabulary by two Triton kernels, which read each logit once."""
