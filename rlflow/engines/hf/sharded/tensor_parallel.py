"""Tensor parallelism: every rank holds a part of each layer, by the model's own plan.

Projections into heads and hidden units are cut by columns, those back by rows, the embedding and
the language-model head by vocabulary (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3);
of experts a rank has whole ones, of latent attention the maps from latents to its heads. A rank's
part is an ordinary, smaller parameter; what is cut where is in `Split`. This file knows how a layer
is cut and computed, neither rows nor optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from rlflow.contract.engines import ModelConfig
from rlflow.engines.hf.forward.attention import packed_tokens
from rlflow.engines.hf.forward.kernels import linear, low_rank
from rlflow.engines.hf.lora import AdaptedLinear
from rlflow.engines.hf.recompute import body_name
from rlflow.engines.hf.routing.experts import own_experts
from rlflow.engines.hf.sharded.mesh import chunk
from rlflow.engines.hf.sharded.token_parts import Copied, Gathered, OutOfBlock, Summed
from rlflow.errors import Finding, UsageError
from rlflow.modelfiles.families import uncut

Role = Literal["columns", "rows", "whole_columns", "vocabulary", "shared", "experts", "latent"]

# Those whose parameters every rank has whole.
WHOLE: frozenset[Role] = frozenset({"shared", "latent"})
# What transformers' plans call the ways of cutting a layer.
ROLES: dict[str, Role] = {
    "colwise": "columns",
    "rowwise": "rows",
    "colwise_gather_output": "whole_columns",
    "colwise_rep": "whole_columns",
    "replicated_with_grad_allreduce": "shared",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "latent",
}
# Their ways of cutting the stacked parameters of experts, of which ranks have whole ones here.
STACKED = (".experts.gate_up_proj", ".experts.down_proj")
SHARED_EXPERT = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
SHARED_EXPERTS = {name.replace("expert.", "experts."): way for name, way in SHARED_EXPERT.items()}
LATENT = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
NORMED = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
HEAD_NORMS = dict.fromkeys(NORMED, "replicated_with_grad_allreduce")
# What the plan of a family leaves out.
BESIDE = {
    "qwen3_vl_moe_text": HEAD_NORMS,
    "qwen2_moe": SHARED_EXPERT,
    "deepseek_v3": LATENT,
    "axk1": LATENT,
    "youtu": LATENT,
    "glm4_moe_lite": SHARED_EXPERTS,
}
# The plan of the Llama family, for a config that brings none.
FAMILY = {"llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text"}
FAMILY_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    **HEAD_NORMS,
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A parameter's part: `start` to `stop` of the `size` that dimension `dim` has in all."""

    dim: int
    start: int
    stop: int
    size: int


class _Style(ParallelStyle):
    """What `parallelize_module` does to one layer of a plan."""

    def __init__(self, split: Split, role: Role) -> None:
        self.split = split
        self.role = role

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.split.take(module, self.role)
        return module


class Standing:
    """A layer with other tensors, layers or numbers in the place of some of its own."""

    def __init__(self, layer: nn.Module, others: Mapping[str, Any]) -> None:
        self.layer = layer
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        """What the layer has; its methods see what stands here."""
        found = getattr(self.layer, name)
        if getattr(found, "__self__", None) is self.layer:
            return partial(found.__func__, self)
        return found


class Split:
    """One rank's parts of a model's layers over the one-dimensional `mesh`.

    `roles` says how a layer is cut, `cuts` what a parameter, by its identity, is a part of. Of a
    latent the last `rotated` numbers are a part of the key that all heads share. With
    `sequence` ranks have parts of the tokens outside of the blocks that are cut (`sequence`), but
    all that is embedded where it `embeds_all`, among which pictures are put.
    """

    sequence = False
    embeds_all = False

    def __init__(self, mesh: DeviceMesh, rotated: int = 0) -> None:
        self.mesh = mesh
        self.rotated = rotated
        self.group = mesh.get_group()
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.roles: dict[nn.Module, Role] = {}
        self.weights: dict[nn.Module, Cut] = {}
        self.cuts: dict[int, Cut] = {}
        # Whole parameters and their parts; a tied weight is cut once.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def take(self, layer: Any, role: Role) -> None:
        """Replace a layer's parameters by this rank's parts, and its forward by one for them."""
        self.roles[layer] = role
        if role == "experts":
            self.cut(layer, "gate_up_proj", 0)
            self.cut(layer, "down_proj", 0)
            self.weights[layer] = self.cuts[id(layer.gate_up_proj)]
        elif role not in WHOLE:
            self.cut(layer, "weight", 1 if role == "rows" else 0)
            self.weights[layer] = self.cuts[id(layer.weight)]
        if role in ("columns", "whole_columns"):
            self.cut(layer, "bias", 0)
        if isinstance(layer, AdaptedLinear) and role not in WHOLE:
            self.cut(layer, *(("lora_A", 1) if role == "rows" else ("lora_B", 0)))
        layer.forward = self.forward(layer)

    def cut(self, layer: nn.Module, leaf: str, dim: int) -> None:
        """Put this rank's part in the place of one parameter, which may be None."""
        whole = getattr(layer, leaf)
        if whole is None:
            return
        if id(whole) not in self._made:
            shape = list(whole.shape)
            start, stop = chunk(shape[dim], self.size, self.rank)
            cut = Cut(dim=dim, start=start, stop=stop, size=shape[dim])
            shape[dim] = stop - start
            part = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
            self._made[id(whole)] = (whole, part)
            self.cuts[id(part)] = cut
        setattr(layer, leaf, self._made[id(whole)][1])

    def forward(self, layer: Any) -> Callable[..., Tensor]:
        """The forward of a layer that was cut, for inputs that every rank has whole."""
        role = self.roles[layer]
        if role == "vocabulary":
            return partial(self.embed, layer)
        if role == "shared":
            return partial(self.shared, layer)
        if role == "experts":
            return partial(self.experts, layer)
        if role == "latent":
            return partial(self.latent, layer.forward)
        if role == "rows":
            return partial(self.project, layer=layer)
        into = self.entered if role == "columns" else self.copied
        return lambda x: self.project(into(x), layer)

    def copied(self, x: Tensor) -> Tensor:
        """See `Copied`."""
        if not torch.is_grad_enabled():
            return x
        output: Tensor = Copied.apply(x, self.group)  # type: ignore[no-untyped-call]
        return output

    def entered(self, x: Tensor) -> Tensor:
        """The tokens that a block begins with, which `sequence` has brought together before it."""
        return x if self.sequence and packed_tokens() is not None else self.copied(x)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the ranks' values `[..., tokens, size]`, or of it this rank's tokens."""
        if not self.sequence or packed_tokens() is None:
            return self.total(x)
        output: Tensor = OutOfBlock.apply(x, self.group)  # type: ignore[no-untyped-call]
        return output

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' values, on all of them."""
        output: Tensor = Summed.apply(x, self.group)  # type: ignore[no-untyped-call]
        return output

    def project(self, x: Tensor, layer: Any) -> Tensor:
        """A linear layer's output for `x [..., in]`; by columns, `x` must be a `copied` one.

        By columns the output is this rank's part of the features, by rows the sum over the
        ranks, whose parts of the features `x` is.
        """
        role = self.roles[layer]
        bias = None if role == "rows" else layer.bias
        own: Any = Standing(layer, {"bias": bias, "out_features": len(layer.weight)})
        output = linear(x, own)
        if isinstance(layer, AdaptedLinear) and layer.adapters.active:
            output = output + self.change(x, layer).view(output.shape)
        if role == "rows":
            output = self.summed(output)
            return output if layer.bias is None else output + layer.bias
        if role == "columns":
            return output
        whole: Tensor = Gathered.apply(output, self.group, self.weights[layer].size)  # type: ignore[no-untyped-call]
        return whole

    def change(self, x: Tensor, layer: AdaptedLinear) -> Tensor:
        """What this rank's part of an adapter adds for `x [..., in]`, `[rows, out]`."""
        down, up = layer.lora_A, layer.lora_B
        rows = x.reshape(-1, x.shape[-1])
        if self.roles[layer] == "rows":
            return low_rank(rows, down, self.copied(up), layer.adapters.scale)
        return low_rank(rows, self.copied(down), up, layer.adapters.scale)

    def embed(self, layer: nn.Embedding, tokens: Tensor) -> Tensor:
        """Embeddings of `tokens`, of which this rank has a part of the vocabulary."""
        cut, padding = self.weights[layer], layer.padding_idx
        own = (tokens >= cut.start) & (tokens < cut.stop)
        if padding is not None:
            padding = padding - cut.start if cut.start <= padding < cut.stop else None
        places = (tokens - cut.start).masked_fill(~own, 0)
        found = nn.functional.embedding(places, layer.weight, padding)
        scale = getattr(layer, "embed_scale", 1)
        found = found * (scale.to(found.dtype) if isinstance(scale, Tensor) else scale)
        made = found * own[..., None]
        return self.total(made) if self.embeds_all else self.summed(made)

    def experts(self, layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What all ranks' experts make of tokens `x`, which see the same; see `own_experts`."""
        first = self.weights[layer].start
        return self.summed(own_experts(layer, first, self.copied(x), chosen, self.copied(weights)))

    def latent(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A latent `[..., rank + rotated]` of each token, by the layer's own forward.

        Of its rotated part each rank's heads have a gradient; the maps that follow the rest have
        added up theirs already.
        """
        made = forward(x)
        rank = made.shape[-1] - self.rotated
        return torch.cat([made[..., :rank], self.copied(made[..., rank:])], -1)

    def whole_weight(self, layer: Any) -> Tensor:
        """The weight of a layer that sees a rank's heads; `sequence` adds up its gradients late."""
        found: Tensor = layer.weight if self.sequence else self.copied(layer.weight)
        return found

    def shared(self, layer: Any, x: Tensor) -> Tensor:
        """The layer's own forward; each rank has the gradients of its part of the heads."""
        standing = Standing(layer, {"weight": self.whole_weight(layer)})
        output: Tensor = type(layer).forward(standing, x)
        return output


def parallelize(module: nn.Module, config: ModelConfig, mesh: DeviceMesh, name: str) -> Split:
    """Cut a model on the meta device over the ranks of `mesh`, by its own plan or the family's.

    Raises UsageError, naming the model, where there is no plan, where the plan has a way of
    cutting that is not known here, or where heads or layers do not divide.
    """
    split = Split(mesh, getattr(config.get_text_config(), "qk_rope_head_dim", None) or 0)
    plan = layer_roles(module, config, name)
    findings = [*undivided_heads(config, split.size, name)]
    for layer, role in plan.items():
        findings += undivided(layer, module.get_submodule(layer), role, split.size)
    if findings:
        raise UsageError(*findings)
    styles: dict[str, ParallelStyle] = {layer: _Style(split, role) for layer, role in plan.items()}
    parallelize_module(module, mesh, styles)
    return split


def layer_roles(module: nn.Module, config: ModelConfig, name: str) -> dict[str, Role]:
    """How each layer that is cut is cut, by its name in `module`."""
    inner: Any = getattr(module, "body", module)
    prefix = body_name(module)
    text = config.get_text_config()
    own = getattr(text, "base_model_tp_plan", None)
    if own is None and text.model_type in FAMILY:
        own = FAMILY_PLAN
    if not own:
        raise UsageError(no_plan(name, text.model_type, "no plan for tensor parallelism"))
    own = {key: way for key, way in own.items() if not key.endswith(STACKED)}
    own |= BESIDE.get(text.model_type, {})
    unknown = sorted({way for way in own.values() if way not in ROLES})
    if unknown:
        raise UsageError(no_plan(name, text.model_type, ", ".join(unknown)))
    patterns = {f"{prefix}.{key}".lstrip("."): way for key, way in own.items()}
    found = {
        layer: ROLES[way]
        for layer, _ in module.named_modules()
        for pattern, way in patterns.items()
        if matches(layer, pattern)
    }
    return found | vocabulary_roles(module, inner)


def matches(layer: str, pattern: str) -> bool:
    """Whether a name fits a pattern in which `*` stands for one part of a name."""
    parts, wanted = layer.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        want in ("*", part) for part, want in zip(parts, wanted, strict=True)
    )


def vocabulary_roles(module: nn.Module, inner: Any) -> dict[str, Role]:
    """The embedding, and the head on it, where both can be cut by vocabulary."""
    names = {part: known for known, part in module.named_modules()}
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if not is_plain(embedding) or type(head) not in (nn.Linear, type(None)):
        return {}
    found: dict[str, Role] = {names[embedding]: "vocabulary"}
    if head is not None:
        found[names[head]] = "whole_columns"
    return found


def is_plain(embedding: nn.Module) -> bool:
    """Whether a layer embeds tokens, and no more than makes all of it larger."""
    return type(embedding) is nn.Embedding or (
        isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale")
    )


def no_plan(name: str, kind: str, got: str) -> Finding:
    """What is wrong with an architecture that nobody says how to cut."""
    return uncut(name, kind, got, "a plan made of " + ", ".join(sorted(ROLES)))


def undivided_heads(config: ModelConfig, ranks: int, name: str) -> list[Finding]:
    """Numbers of heads that `ranks` does not divide."""
    text = config.get_text_config()
    counts = {
        key: getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    }
    return [
        Finding(
            code="E522",
            what=f"tp={ranks} does not divide the {key} of model {name!r}",
            got=str(count),
            expected=f"a multiple of {ranks}",
        )
        for key, count in counts.items()
        if count is not None and count % ranks
    ]


def undivided(layer: str, module: Any, role: Role, ranks: int) -> list[Finding]:
    """What is wrong with a layer of which some rank would have another part, or none."""
    if role in WHOLE:
        return []
    what = {"rows": "inputs", "experts": "experts"}.get(role, "outputs")
    whole = module.gate_up_proj if role == "experts" else module.weight
    size = whole.shape[1 if role == "rows" else 0]
    if role in ("columns", "rows", "experts"):
        wrong = size % ranks != 0
    else:
        wrong = chunk(size, ranks, ranks - 1)[0] == size
    if not wrong:
        return []
    return [
        Finding(
            code="E522",
            what=f"tp={ranks} does not divide layer {layer!r}",
            got=f"{size} {what}",
            expected=f"a multiple of {ranks}",
        )
    ]
