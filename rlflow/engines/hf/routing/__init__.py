"""Mixtures of experts: what routers chose and how they are trained, and how experts compute."""
