"""Layers that carry states from token to token: what ranks share out of them, and exchange for it.

A gated delta rule and Mamba-2 recur head by head, a short convolution channel by channel. Knows
configs; neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlflow.modelfiles.configs import HIDDEN, text_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """So many `layers`, each of `heads` that can be computed apart; of one without 0.

    A head of keys goes with the values that it is the key of. `entering` numbers of a token are
    what all heads of a layer are made of, `leaving` what they make. `shared` are those among them
    that heads of each of `groups` have in common, and that are repeated where ranks are more.
    """

    layers: int = 0
    heads: int = 0
    entering: int = 0
    leaving: int = 0
    groups: int = 1
    shared: int = 0

    def parts(self, ranks: int) -> bool:
        """Whether each of so many ranks can have as many heads, of whole groups or of one."""
        return self.heads % ranks == 0 and (self.groups % ranks == 0 or ranks % self.groups == 0)

    def entering_on(self, ranks: int) -> int:
        """Numbers of a token that a layer's heads on so many ranks are made of."""
        return self.entering + self.shared * max(ranks // self.groups - 1, 0)


NOTHING = Carrying()


def carrying_of(text: Mapping[str, Any], layers: int) -> Carrying:
    """What a config says of so many layers that carry states."""
    if not layers:
        return NOTHING
    return replace(_delta(text) or _grouped(text) or _convolved(text), layers=layers)


def _delta(text: Mapping[str, Any]) -> Carrying | None:
    """Gated delta rules: queries, keys, values, gates, and two numbers for each head of values."""
    values = text_value(text, "linear_num_value_heads")
    if not values:
        return None
    keys = text_value(text, "linear_num_key_heads")
    key, value = (text_value(text, f"linear_{each}_head_dim") for each in ("key", "value"))
    entering = 2 * keys * key + 2 * values * value + 2 * values
    return Carrying(heads=keys, entering=entering, leaving=values * value)


def _grouped(text: Mapping[str, Any]) -> Carrying | None:
    """Mamba-2: inputs and a step for each head, and two states for each group."""
    heads = text_value(text, "mamba_n_heads", "mamba_num_heads")
    if not heads:
        return None
    groups = text_value(text, "mamba_n_groups", "n_groups") or 1
    wide = heads * text_value(text, "mamba_d_head", "mamba_head_dim")
    states = 2 * groups * text_value(text, "mamba_d_state", "ssm_state_size")
    entering = wide + states + heads
    return Carrying(heads=heads, entering=entering, leaving=wide, groups=groups, shared=states)


def _convolved(text: Mapping[str, Any]) -> Carrying:
    """Short convolutions: two gates and an input for each channel. Nothing of what is unsaid."""
    wide = text_value(text, *HIDDEN) if text_value(text, "conv_L_cache") else 0
    return Carrying(heads=wide, entering=3 * wide, leaving=wide)
