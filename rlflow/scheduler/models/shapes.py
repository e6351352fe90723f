"""Sizes of models, read from files: `config.json` and the headers of safetensors.

Reads a few hundred bytes and imports no torch. A hub name is looked up in the local cache; a model
that is not here has no shape, and the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.errors import UsageError
from rlflow.graph.model import Model
from rlflow.modelfiles.chunks import WIDE_BYTES
from rlflow.modelfiles.configs import read_config, text_config
from rlflow.modelfiles.directories import model_directory
from rlflow.modelfiles.families import DENSE, Family, family_of, packing_finding
from rlflow.modelfiles.headers import tensor_shapes
from rlflow.modelfiles.host_memory import made_whole
from rlflow.modelfiles.kernels.attention import softcap_of
from rlflow.modelfiles.layouts.carrying import NOTHING, Carrying
from rlflow.modelfiles.layouts.contexts import WINDOWED, windowed
from rlflow.modelfiles.orthogonal import stored_matrices
from rlflow.modelfiles.pictures.sights import Sight, sight_of
from rlflow.modelfiles.pictures.towers import FREEZABLE, parts_described, parts_that_see
from rlflow.modelfiles.pictures.widths import TowerWidths, tower_widths
from rlflow.modelfiles.widths import Widths, widths_of
from rlflow.scheduler.models.known_shapes import PREFIX, known_model_type, known_widths

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What costs need to know of a model: `parameters` is a count, the rest widths.

    `embedding` counts the parameters of the embedding and of a head that is not tied to it; `ffn`
    is the width inside a feed-forward layer that a token passes, the mean over layers; `sides` are
    those beside experts, which have `expert_ffn` each. Of the parameters `idle` are experts that a
    token does not choose; `experts` a layer, of which it takes `chosen`, in `expert_layers` of the
    `layers`. `latent` numbers a layer are what is cached of a token, where that is less than its
    keys and values, and that of queries has `query_rank`. So many layers are `without_attention`; a
    row carries the inputs that convolutions have `convolved` last, and the `recurrent` numbers of
    states, in layers that are `carrying` them. `norms` counts the weights of norms and `routers`
    those that choose experts, of which every rank of a layer has all. `matrices` are those of
    layers: rows, columns, and how many of such; none are known of experts. `family` says what can
    be computed of it. A token chooses `routed` experts in all layers together. Where it is
    `made_whole` one process makes it in host memory before weights go to devices. Scores may have a
    `softcap`; there are `windows` where layers see a part of a row. So many parameters are a
    `tower` that sees pictures, by `sight`, and of these a `projector`; `eyes` are the widths of it.
    Training leaves `still` parts as they are; `matrices` are then of the others alone, and
    `seen_matrices` those of them that are a tower's. With `head_norms` queries and keys have norms
    of their own.
    """

    parameters: int
    embedding: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    source: str
    sides: tuple[int, ...] = ()
    expert_ffn: int = 0
    idle: int = 0
    experts: int = 0
    chosen: int = 0
    routed: int = 0
    latent: int = 0
    query_rank: int = 0
    without_attention: int = 0
    convolved: int = 0
    recurrent: int = 0
    carrying: Carrying = NOTHING
    norms: int = 0
    routers: int = 0
    matrices: tuple[tuple[int, int, int], ...] = ()
    family: Family = DENSE
    kind: str = ""
    made_whole: bool = False
    softcap: float | None = None
    windows: bool = False
    tower: int = 0
    projector: int = 0
    seen_matrices: tuple[tuple[int, int, int], ...] = ()
    still: tuple[str, ...] = ()
    eyes: TowerWidths | None = None
    sight: Sight | None = None
    head_norms: bool = False

    @property
    def active(self) -> int:
        """Parameters that one token passes through; pictures alone pass a tower."""
        return self.parameters - self.tower - self.idle

    def touched(self, tokens: float) -> float:
        """Parameters that so many tokens pass through together, in expectation.

        Tokens choose independently, so an expert is left out with (1 - chosen / experts)^tokens.
        """
        if not self.experts:
            return self.parameters - self.tower
        passed_by = 1 - self.chosen / self.experts
        return self.parameters - self.tower - self.idle * math.pow(passed_by, max(tokens, 1.0) - 1)

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.routed // self.chosen if self.chosen else 0

    @property
    def in_experts(self) -> int:
        """Parameters in the experts of all layers; shared ones are not among them."""
        left_out = self.experts - self.chosen
        return self.idle * self.experts // left_out if left_out > 0 else 0

    @property
    def in_matrices(self) -> int:
        """Parameters in the matrices of layers."""
        return sum(rows * columns * count for rows, columns, count in self.matrices)

    @property
    def in_seen_matrices(self) -> int:
        """Parameters among them in those of a tower."""
        return sum(rows * columns * count for rows, columns, count in self.seen_matrices)

    @property
    def seeing(self) -> dict[str, int]:
        """Parameters of each part that sees, of those that there are."""
        parts = {"vision": self.tower - self.projector, "projector": self.projector}
        return {part: count for part, count in parts.items() if count}

    @property
    def frozen(self) -> int:
        """Parameters that training leaves as they are."""
        return sum(self.seeing.get(part, 0) for part in self.still)

    def trains(self, part: str) -> bool:
        """Whether training changes a part that sees."""
        return part in self.seeing and part not in self.still

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return max(self.parameters - self.embedding - self.tower, 0) // self.layers

    @property
    def cached(self) -> int:
        """Numbers that a token's keys and values are, over all layers."""
        return self.attending * (self.latent or 2 * self.kv_heads * self.head_dim)

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.layers - self.without_attention

    def carried(self, size: int) -> int:
        """Bytes of the states of a row in all layers; those of recurrences are float32."""
        return self.convolved * size + self.recurrent * WIDE_BYTES

    def cached_on_each(self, tp: int) -> float:
        """Of those numbers what each of `tp` ranks has: its heads' part, or all of the latents."""
        return self.cached if self.latent else self.cached / self.parts_of_keys(tp)

    def parts_of_keys(self, tp: int) -> int:
        """In how many parts `tp` ranks have keys and values: a head each where ranks are more."""
        return tp if self.latent else min(tp, self.kv_heads or tp)

    def repeated_heads(self, tp: int) -> float:
        """Key-value heads that each of `tp` ranks has beyond an equal share of them."""
        parts = self.parts_of_keys(tp)
        return self.kv_heads * (tp - parts) / (tp * parts)

    def repeated_keys(self, tp: int) -> int:
        """Parameters of keys and values that each rank has beyond an equal share; no biases.

        Of latent attention those of the maps to latents, which every rank has whole.
        """
        if self.latent:
            every = self.attending * self.hidden * (self.query_rank + self.latent)
            return every * (tp - 1) // tp
        parts = self.parts_of_keys(tp)
        every = 2 * self.attending * self.hidden * self.kv_heads * self.head_dim
        return every * (tp - parts) // (tp * parts)

    def uncut(self, tp: int, *, repeats: bool) -> list[str]:
        """The widths that `tp` ranks cannot cut, by name.

        An engine `repeats` key-value heads where ranks are a multiple of them, each on as many
        neighbours (`QKVParallelLinear` of SGLang and of vLLM), and cuts experts, which lie whole
        elsewhere.
        """
        keys = self.kv_heads % tp
        keys = tp % self.kv_heads if repeats and keys else keys
        widths = {
            "heads": self.heads % tp,
            "key-value heads": keys,
            "feed-forward width": any(side % tp for side in self.sides),
            "width of experts": repeats and self.expert_ffn % tp,
        }
        return [name for name, left in widths.items() if left]

    def linear(self, name: str) -> tuple[int, int] | None:
        """Input and output width of the linear layer of that name; None where none is known."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }
        if not self.experts:
            widths |= {
                "gate_proj": (self.hidden, self.ffn),
                "up_proj": (self.hidden, self.ffn),
                "down_proj": (self.ffn, self.hidden),
            }
        return widths.get(name.rpartition(".")[2])


def read_shape(directory: Path) -> Shape:
    """The shape of the model in a directory.

    Raises UsageError where `config.json` is not JSON or lacks the usual names.
    """
    config = read_config(directory)
    family, kind = family_of(config), str(text_config(config).get("model_type", ""))
    widths = _computed_widths(config, directory, family)
    counted, source = count_parameters(directory, tied=widths.tied), "safetensors headers"
    named = tensor_shapes(directory)
    seeing = parts_that_see(named) if named else parts_described(config)
    tower = sum(seeing.values())
    if counted is None:
        counted, source = widths.parameters + tower, "config.json"
    found = _shape_of(widths, counted, source, family=family, kind=kind)
    whole, capped = made_whole(config, named), softcap_of(text_config(config))
    found = replace(found, made_whole=whole, softcap=capped, windows=windowed(config))
    found = replace(found, tower=tower, projector=seeing.get("projector", 0))
    if family.sees:
        sight = sight_of(directory, config)
        found = replace(found, sight=sight, eyes=tower_widths(config, sight, seeing))
    return _with_matrices(found, directory)


def _computed_widths(config: Mapping[str, Any], directory: Path, family: Family) -> Widths:
    """The widths of a config; what cannot be computed and has none is refused for that."""
    try:
        return widths_of(config, directory / "config.json")
    except UsageError:
        refused = packing_finding(str(directory), family)
        if refused is not None:
            raise UsageError(refused) from None
        raise


def _shape_of(
    widths: Widths, parameters: int, source: str, *, family: Family = DENSE, kind: str = ""
) -> Shape:
    """What costs need of some widths, with a count of all parameters."""
    return Shape(
        parameters=parameters,
        embedding=widths.embedding,
        layers=widths.layers,
        hidden=widths.hidden,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.attended,
        ffn=widths.inside,
        vocab=widths.vocab,
        context=widths.context,
        source=source,
        sides=widths.sides,
        expert_ffn=widths.expert_ffn if widths.experts else 0,
        idle=widths.idle,
        experts=widths.experts,
        chosen=widths.chosen,
        routed=widths.expert_layers * widths.chosen,
        latent=widths.latent + widths.rope_dim if widths.latent else 0,
        query_rank=widths.query_rank,
        without_attention=widths.without_attention,
        convolved=widths.convolved,
        recurrent=widths.recurrent,
        carrying=widths.carrying,
        norms=widths.norm_weights,
        routers=widths.routers,
        head_norms=widths.head_norms or widths.wide_norms,
        matrices=() if widths.experts else widths.layer_matrices,
        family=family,
        kind=kind,
    )


def count_parameters(directory: Path, *, tied: bool = False) -> int | None:
    """Elements of all tensors in the safetensors files; None where there are no such files.

    A head that is the embedding is counted once, also where it is written twice.
    """
    shapes = tensor_shapes(directory)
    if tied and "lm_head.weight" in shapes and len(shapes) > 1:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    return sum(math.prod(shape) for shape in shapes.values()) if shapes else None


def model_shape(model: Model, near: Path | None = None) -> Shape | None:
    """The shape of a declared model, or None where its files are not on this machine.

    A path such as `shape:qwen2.5-7b` names a public model by its shape alone. With a value head
    there is none over the vocabulary.
    """
    if model.path.startswith(PREFIX):
        shape = known_shape(model.path.removeprefix(PREFIX))
        return _of_a_body(shape, counted=True) if model.head == "value" else shape
    directory = model_directory(model.path, near)
    if directory is None:
        return None
    shape = _with_frozen(read_shape(directory), model, directory)
    if model.head != "value":
        return shape
    stored = tensor_shapes(directory)
    return _of_a_body(shape, counted=not stored or "lm_head.weight" in stored)


def _with_frozen(shape: Shape, model: Model, directory: Path) -> Shape:
    """The shape with what a model says is frozen of it."""
    if not model.freeze:
        return shape
    return _with_matrices(replace(shape, still=model.freeze), directory)


def _with_matrices(shape: Shape, directory: Path) -> Shape:
    """The shape with the matrices that files have of what is trained, where there are files."""
    stored = stored_matrices(directory, shape.still)
    if not stored or shape.experts:
        return shape
    seen = stored_matrices(directory, shape.still, FREEZABLE)
    return replace(shape, matrices=stored, seen_matrices=seen)


def _of_a_body(shape: Shape, *, counted: bool) -> Shape:
    """The shape without a head that is not tied to the embedding, where its weights are counted."""
    one = shape.vocab * shape.hidden
    beside = max(shape.embedding - one, 0)
    gone = beside if counted else 0
    return replace(shape, parameters=shape.parameters - gone, embedding=shape.embedding - beside)


def known_shape(name: str) -> Shape:
    """The shape of a public model, from the table. Raises UsageError for one not in it."""
    widths, kind = known_widths(name), known_model_type(name)
    family, source = family_of({"model_type": kind}), f"the widths of {name}"
    found = _shape_of(widths, widths.parameters, source, family=family, kind=kind)
    return replace(found, windows=kind in WINDOWED)


def stand_ins(models: Sequence[Model]) -> list[str]:
    """Which models are taken as which public ones, a sentence each, with dtype as declared."""
    found: dict[tuple[str, str], list[str]] = {}
    for model in models:
        if model.path.startswith(PREFIX):
            name = model.path.removeprefix(PREFIX)
            found.setdefault((name, model.dtype), []).append(model.name)
    return [
        f"{' and '.join(names)} taken as {name}, {_billions(known_widths(name))}, "
        f"in {dtype} as declared"
        for (name, dtype), names in found.items()
    ]


def _billions(widths: Widths) -> str:
    total = f"{widths.parameters / 1e9:.2f} billion parameters"
    active = (widths.parameters - widths.idle) / 1e9
    return f"{total}, {active:.2f} billion of them for each token" if widths.idle else total


def trained_parameters(model: Model, shape: Shape) -> int | None:
    """How many parameters an update changes: all but frozen ones, or the adapters and a new head.

    An adapter of rank r of a layer with inputs n and outputs m has r (n + m) parameters (Hu
    et al. 2021, section 4.1). None where a target is no layer whose widths are known.
    """
    if model.lora is None:
        return shape.parameters - shape.frozen
    widths = [shape.linear(name) for name in model.lora.targets]
    sizes = [sum(pair) for pair in widths if pair is not None]
    if len(sizes) < len(widths):
        return None
    head = shape.hidden if model.head == "value" else 0
    return shape.layers * model.lora.rank * sum(sizes) + head


def dtype_bytes(model: Model) -> int:
    """Bytes of one parameter."""
    return DTYPE_BYTES[model.dtype]
