"""Routers of mixtures of experts: what they chose and are to choose, and how they are trained."""
