"""Layers that carry states from token to token: what ranks share out of them, and exchange for it.

A gated delta rule and Mamba-2 recur head by head, a short convolution channel by channel. Knows
configs; neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.modelfiles.configs import HIDDEN, text_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """So many `layers`, each of `heads` that can be computed apart; of one without 0.

    A head of keys goes with the values that it is the key of, a group of Mamba-2 with its heads.
    `entering` numbers of a token are what all heads of a layer are made of, `leaving` what they
    make.
    """

    layers: int = 0
    heads: int = 0
    entering: int = 0
    leaving: int = 0


NOTHING = Carrying()


def carrying_of(text: Mapping[str, Any], layers: int) -> Carrying:
    """What a config says of so many layers that carry states."""
    found = _delta(text) or _grouped(text) or _convolved(text)
    heads, entering, leaving = found if layers else (0, 0, 0)
    return Carrying(layers=layers, heads=heads, entering=entering, leaving=leaving)


def _delta(text: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Gated delta rules: queries, keys, values, gates, and two numbers for each head of values."""
    values = text_value(text, "linear_num_value_heads")
    if not values:
        return None
    keys = text_value(text, "linear_num_key_heads")
    key, value = (text_value(text, f"linear_{each}_head_dim") for each in ("key", "value"))
    return keys, 2 * keys * key + 2 * values * value + 2 * values, values * value


def _grouped(text: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Mamba-2: inputs, gates and a step for each head, and two states for each group."""
    heads = text_value(text, "mamba_n_heads", "mamba_num_heads")
    if not heads:
        return None
    groups = text_value(text, "mamba_n_groups", "n_groups")
    wide = heads * text_value(text, "mamba_d_head", "mamba_head_dim")
    states = 2 * groups * text_value(text, "mamba_d_state", "ssm_state_size")
    return groups, 2 * wide + states + heads, wide


def _convolved(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Short convolutions: two gates and an input for each channel. Nothing of what is unsaid."""
    wide = text_value(text, *HIDDEN) if text_value(text, "conv_L_cache") else 0
    return wide, 3 * wide, wide
