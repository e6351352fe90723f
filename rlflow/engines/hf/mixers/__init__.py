"""Layers that mix tokens otherwise than by plain attention: latents, and states of rows."""
