"""How much of what a backward reads is on the device, where the rest of it is on the host.

The engine brings layers by the rule by which the plan counts them, which is here.
"""

from __future__ import annotations

LAYERS_ON_DEVICE = 2
"""Layers whose activations are on the device at once: one computes, one leaves or comes."""
LAYERS_KEPT = 1
"""Layers whose activations never leave: the last, whose backward comes next."""
PIECE_BYTES = 32 << 20
"""Bytes of one piece of host memory."""
ALIGNMENT = 256
"""Bytes of which what lies in host memory begins at a multiple."""
LEAST_BYTES = 4096
"""Bytes of the smallest tensor that is worth a copy."""


def layers_on_device(layers: int) -> int:
    """Of so many layers those whose activations are on the device at once."""
    return min(layers, LAYERS_ON_DEVICE)


def layers_on_host(layers: int) -> int:
    """Of so many layers those whose activations go to the host."""
    return max(0, layers - LAYERS_KEPT)


def in_pieces(size: int) -> int:
    """Bytes of the pieces that hold so many bytes."""
    return -(-size // PIECE_BYTES) * PIECE_BYTES
