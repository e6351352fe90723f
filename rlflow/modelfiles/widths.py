"""Widths of decoders, as `config.json` says them, and how many parameters follow.

All parameters take memory; those that a token passes through, `active`, take time. A mixture of
experts has each expert's in memory and the chosen ones' in time (Shazeer et al. 2017, section 2);
multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) has projections through a
narrow space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError
from rlflow.modelfiles.configs import (
    CONTEXT,
    COUNTS,
    HEADS,
    HIDDEN,
    INSIDE,
    LAYERS,
    required,
    text_config,
    text_value,
)
from rlflow.modelfiles.families import Family, family_of
from rlflow.modelfiles.layouts.carrying import NOTHING, Carrying, carrying_of
from rlflow.modelfiles.mixtures.layers import experts_a_token, mixture_layers

# Kinds of layers that do not attend, and kinds that carry a state from token to token.
NOT_ATTENDING = {"linear_attention", "conv", "mamba", "moe", "mlp"}
STATEFUL = {"linear_attention", "conv", "mamba", "hybrid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The widths of a decoder; gated unless `matrices` is 2.

    `tied` says whether the head is the embedding; `biases` whether the projections to queries,
    keys and values have them, `all_biases` that to the layer too, `ffn_biases` the feed-forward
    layer. `head_norms` says whether queries and keys are normed by head, `wide_norms` all heads
    together. `norms` counts those of a layer as wide as it; 0 are norms without weights, and with
    `shifts` they have biases. `experts` of `expert_ffn` stand in all layers but
    `dense`, of which a token takes `chosen`, with `shared_ffn` beside them. `latent` is the rank
    of keys and values, `query_rank` that of queries, 0 where they are projected at once. So many
    layers are `without_attention`; a row carries the inputs that convolutions have `convolved` last
    and the `recurrent` numbers of states, of all layers, of which `carrying` says what they are.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    tied: bool = False
    biases: bool = False
    head_norms: bool = False
    wide_norms: bool = False
    shifts: bool = False
    all_biases: bool = False
    ffn_biases: bool = False
    norms: int = 2
    matrices: int = 3
    extra: int = 0
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0
    expert_biases: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    dense: int = 0
    latent: int = 0
    query_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    without_attention: int = 0
    convolved: int = 0
    recurrent: int = 0
    carrying: Carrying = NOTHING

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where it is another matrix."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def norm_weights(self) -> int:
        """Parameters of the norms: of layers, of queries and keys by head, and the last one."""
        of_layers = self.layers * (self.norms * self.norm + self._inner_norms)
        return of_layers + self.last_norm

    @property
    def norm(self) -> int:
        """Parameters of one norm as wide as a layer."""
        return self.hidden * (2 if self.shifts else 1)

    @property
    def last_norm(self) -> int:
        """Parameters of the norm before the head."""
        return self.norm if self.norms else 0

    @property
    def _inner_norms(self) -> int:
        """Parameters of the norms of queries and keys of a layer."""
        if self.wide_norms:
            return (self.heads + self.kv_heads) * self.head_dim
        return 2 * self.head_dim if self.head_norms else 0

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention, its biases and the norms of its parts."""
        if self.latent:
            return self._latent_attention()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = queries + 2 * keys if self.biases or self.all_biases else 0
        biases += self.hidden if self.all_biases else 0
        return self.hidden * (2 * queries + 2 * keys) + biases + self._inner_norms

    def _latent_attention(self) -> int:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        asked = self.hidden * queries
        if self.query_rank:
            asked = self.query_rank * (self.hidden + 1 + queries)
        kept = self.hidden * (self.latent + self.rope_dim) + self.latent
        widened = self.latent * self.heads * (self.nope_dim + self.value_dim)
        return asked + kept + widened + self.heads * self.value_dim * self.hidden

    @property
    def layer_matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Rows, columns and how many there are of the matrices of layers without experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inward = self.matrices - 1
        return (
            (queries, self.hidden, self.layers),
            (keys, self.hidden, 2 * self.layers),
            (self.hidden, queries, self.layers),
            (self.ffn, self.hidden, inward * self.layers),
            (self.hidden, self.ffn, self.layers),
        )

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.expert_ffn + self.hidden if self.expert_biases else 0
        return self.matrices * self.hidden * self.expert_ffn + biases

    @property
    def layer(self) -> int:
        """Parameters of one layer without experts: attention, feed-forward, biases and norms."""
        biases = (self.matrices - 1) * self.ffn + self.hidden if self.ffn_biases else 0
        return self._beside + self.matrices * self.hidden * self.ffn + biases

    @property
    def expert_layer(self) -> int:
        """Parameters of one layer with experts, all of them."""
        shared = self.matrices * self.hidden * self.shared_ffn
        return self._beside + self.experts * self.expert + self._router + shared

    @property
    def _router(self) -> int:
        """Parameters of what chooses experts in a layer, and of the gate of the shared one."""
        gate = self.hidden if self.shared_gate else 0
        return self.experts * (self.hidden + self.expert_biases) + gate

    @property
    def routers(self) -> int:
        """The same of all layers."""
        return self.expert_layers * self._router

    @property
    def _beside(self) -> int:
        return self.attention + self.norms * self.norm + self.extra

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.dense if self.experts else 0

    @property
    def parameters(self) -> int:
        """All parameters, those that are shared once, with the last norm."""
        plain = (self.layers - self.expert_layers) * self.layer
        return plain + self.expert_layers * self.expert_layer + self.embedding + self.last_norm

    @property
    def idle(self) -> int:
        """Parameters of the experts that a token does not choose."""
        return self.expert_layers * (self.experts - self.chosen) * self.expert

    @property
    def attended(self) -> int:
        """The width of a head, the mean of keys and values where those differ."""
        if not self.latent:
            return self.head_dim
        return (self.nope_dim + self.rope_dim + self.value_dim) // 2

    @property
    def inside(self) -> int:
        """The width inside the feed-forward part that a token passes, the mean over layers."""
        if not self.experts:
            return self.ffn
        mixed = self.chosen * self.expert_ffn + self.shared_ffn
        return (self.expert_layers * mixed + self.dense * self.ffn) // self.layers

    @property
    def sides(self) -> tuple[int, ...]:
        """The widths inside feed-forward layers, and inside experts that every token passes."""
        plain = self.ffn if self.expert_layers < self.layers else 0
        return tuple(sorted({plain, self.shared_ffn} - {0}))


def widths_of(config: Mapping[str, Any], path: Path) -> Widths:
    """The widths that a config says. Raises UsageError (E205) where it lacks the usual names."""
    text, family = text_config(config), family_of(config)
    get, kind = required(text, path), str(text.get("model_type"))
    hidden, heads = get(*HIDDEN), get(*HEADS)
    ffn = text_value(text, *INSIDE) or 4 * hidden
    if hidden < heads and not text_value(text, "head_dim"):
        raise UsageError(
            Finding(
                code="E205",
                what=f"{path} has more heads than a layer is wide",
                got=f"{heads} heads, a width of {hidden}",
                expected="heads of one number at least",
            )
        )
    return Widths(
        layers=_layers(text, kind) or get(*LAYERS),
        **_carried(text, hidden),
        carrying=carrying_in(config),
        hidden=hidden,
        heads=heads,
        kv_heads=text_value(text, "num_key_value_heads") or heads,
        head_dim=text_value(text, "head_dim") or hidden // heads,
        ffn=ffn,
        vocab=get("vocab_size"),
        context=text_value(text, *CONTEXT),
        tied=_tied(config, text, family),
        **_biases(text, family),
        head_norms=family.head_norms == "each" or bool(text.get("use_qk_norm")),
        wide_norms=family.head_norms == "wide",
        norms=family.norms,
        shifts=family.shifts,
        matrices=3 if family.gated else 2,
        extra=heads if kind == "gpt_oss" else 0,
        **_experts(text, kind, ffn),
        **_latent(text),
    )


def _layers(text: Mapping[str, Any], kind: str) -> int:
    """Layers of a family that counts them otherwise, 0 of others: LongCat's have two attentions."""
    if kind == "longcat_flash":
        return 2 * text_value(text, "num_layers")
    return 0 if text_value(text, *LAYERS) else len(text.get("layers_block_type") or ())


def carrying_in(config: Mapping[str, Any]) -> Carrying:
    """What a config says of layers that carry states."""
    text = text_config(config)
    return carrying_of(text, sum(kind in STATEFUL for kind in _kinds(text)))


def _carried(text: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """What a config says of layers without attention, and of states that rows carry."""
    kinds = _kinds(text)
    carrying = sum(kind in STATEFUL for kind in kinds)
    convolved, recurrent = _state_of_layer(text, hidden)
    return {
        "without_attention": sum(kind in NOT_ATTENDING for kind in kinds),
        "convolved": carrying * convolved,
        "recurrent": carrying * recurrent,
    }


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """The kinds of layers, one by one; empty where all have attention and nothing else."""
    said = text.get("layer_types") or text.get("layers_block_type")
    if said:
        return list(said)
    layers, every = text_value(text, *LAYERS), text_value(text, "full_attention_interval")
    if every and text_value(text, "linear_num_value_heads"):
        return [("linear", "full")[(at + 1) % every == 0] + "_attention" for at in range(layers)]
    full = text.get("full_attn_idxs")
    if full:
        return ["full_attention" if at in full else "conv" for at in range(layers)]
    pattern = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if text.get("hybrid_override_pattern"):
        return [pattern.get(letter, "mlp") for letter in str(text["hybrid_override_pattern"])]
    return ["hybrid"] * layers if text.get("model_type") == "falcon_h1" else []


def _state_of_layer(text: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Numbers that a row carries through a layer: of a convolution's inputs, and of a state.

    Gated delta rules have a matrix of keys by values for each head (arXiv:2412.06464, section 2),
    Mamba-2 one of a head by a state (arXiv:2405.21060, section 2).
    """
    heads = text_value(text, "linear_num_value_heads")
    if heads:
        key, value = (text_value(text, f"linear_{each}_head_dim") for each in ("key", "value"))
        wide = 2 * key * text_value(text, "linear_num_key_heads") + value * heads
        return wide * text_value(text, "linear_conv_kernel_dim"), heads * key * value
    heads = text_value(text, "mamba_n_heads", "mamba_num_heads")
    if heads:
        size = text_value(text, "mamba_d_head", "mamba_head_dim")
        state = text_value(text, "mamba_d_state", "ssm_state_size")
        wide = heads * size + 2 * text_value(text, "mamba_n_groups", "n_groups") * state
        return wide * text_value(text, "mamba_d_conv", "conv_kernel"), heads * size * state
    return hidden * text_value(text, "conv_L_cache"), 0


def _biases(text: Mapping[str, Any], family: Family) -> dict[str, bool]:
    """Which projections have biases, by the family and what a config says."""
    asked, own = bool(text.get("attention_bias")), family.biases
    latent = bool(text.get("kv_lora_rank"))
    return {
        "biases": (own == "qkv" and bool(text.get("qkv_bias", True))) or (own == "asked" and asked),
        "all_biases": own in ("attention", "all") or (own == "asked_all" and asked and not latent),
        "ffn_biases": own == "all" or bool(text.get("mlp_bias")),
    }


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> bool:
    """Whether the head is the embedding; files leave out what is their family's default."""
    said = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return family.tied if said is None else bool(said)


def _experts(text: Mapping[str, Any], kind: str, ffn: int) -> dict[str, Any]:
    """What a config says of experts."""
    count = text_value(text, *COUNTS)
    if count < 2:
        return {}
    width = text_value(text, "moe_intermediate_size", "expert_ffn_hidden_size") or ffn
    shared = text_value(text, "shared_expert_intermediate_size")
    if not shared:
        shared = width * text_value(text, "n_shared_experts", "moe_num_shared_experts")
    return {
        "experts": count,
        "chosen": experts_a_token(text),
        "expert_ffn": width,
        "expert_biases": kind == "gpt_oss",
        "shared_ffn": shared,
        "shared_gate": kind == "qwen2_moe",
        "dense": _dense_layers(text),
    }  # fmt: skip


def _dense_layers(text: Mapping[str, Any]) -> int:
    """How many layers have no experts: the first ones, or all but every so many."""
    return text_value(text, "num_hidden_layers", "n_layer") - len(mixture_layers(text))


def _latent(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of latent attention."""
    if not text.get("kv_lora_rank"):
        return {}
    return {
        "latent": text_value(text, "kv_lora_rank"),
        "query_rank": text_value(text, "q_lora_rank"),
        "rope_dim": text_value(text, "qk_rope_head_dim"),
        "nope_dim": text_value(text, "qk_nope_head_dim"),
        "value_dim": text_value(text, "v_head_dim"),
    }


def length_finding(what: str, got: str, least: int, new: int, context: int) -> Finding | None:
    """E505 where a row of at `least` so many tokens and `new` ones is longer than a context.

    None where it fits, or where a config says no context.
    """
    if not context or least + new <= context:
        return None
    return Finding(
        code="E505",
        what=what,
        got=got,
        expected=f"at most {context} tokens, the model's context",
        fix=f"max_new_tokens={context - least}" if new and least < context else "",
    )
