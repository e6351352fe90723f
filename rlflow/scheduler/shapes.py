"""Sizes of models, read from files: `config.json` and the headers of safetensors.

Reads a few hundred bytes and imports no torch. A hub name is looked up in the local
cache; a model that is not on this machine has no shape, and the plan says so.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError, near_names
from rlflow.graph.model import Model
from rlflow.scheduler.known_shapes import PREFIX, known_widths

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What costs need to know of a model: `parameters` is a count, the rest widths.

    `embedding` counts the parameters of the embedding and of a head that is not tied to it;
    `ffn` is the width inside a feed-forward layer.
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

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return max(self.parameters - self.embedding, 0) // self.layers

    @property
    def cached(self) -> int:
        """Numbers that a token's keys and values are, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def linear(self, name: str) -> tuple[int, int] | None:
        """Input and output width of the linear layer of that name; None where none is known."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.ffn),
            "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.ffn, self.hidden),
        }
        return widths.get(name.rpartition(".")[2])


def model_directory(path: str, near: Path | None = None) -> Path | None:
    """Where a model's files are: the working directory, above the pipeline file, the hub cache.

    Returns None for a hub name that is not in the cache. Raises UsageError for a path
    that is not there.
    """
    bases = [Path.cwd(), *(near.resolve().parents if near is not None else ())]
    for base in bases:
        found = base / path
        if (found / "config.json").is_file():
            return found
    cached = hub_snapshot(path)
    if cached is not None:
        return cached
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    folder = Path(path).parent
    exists_near = any((base / folder).is_dir() for base in bases) and str(folder) != "."
    if looks_local or exists_near or not HUB_NAME.fullmatch(path):
        raise UsageError(_no_model(path, bases))
    return None


def _no_model(path: str, bases: list[Path]) -> Finding:
    for base in bases:
        folder = (base / path).parent
        if folder.is_dir():
            names = [entry.name for entry in folder.iterdir() if (entry / "config.json").is_file()]
            near = near_names(Path(path).name, names)
            return Finding(
                code="E204",
                what=f"there is no model at {path!r}",
                got=f"models in {folder}: {', '.join(sorted(names)) or 'none'}",
                expected="a directory with config.json, or the name of a hub model",
                near=tuple(str(Path(path).parent / name) for name in near),
            )
    return Finding(
        code="E204",
        what=f"there is no model at {path!r}",
        expected="a directory with config.json, or the name of a hub model",
    )


def hub_snapshot(name: str) -> Path | None:
    """Where the files of a hub's model are in the local cache; None where they are not."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    found = [entry for entry in sorted(snapshots.iterdir()) if (entry / "config.json").is_file()]
    return found[-1] if found else None


def read_shape(directory: Path) -> Shape:
    """The shape of the model in a directory.

    Raises UsageError where `config.json` is not JSON or lacks the usual names.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(Finding(code="E205", what=f"{path} is not JSON: {error}")) from None
    get = _first_of(config, path)
    hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
    layers, vocab = get("num_hidden_layers", "n_layer"), get("vocab_size")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    ffn = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    tied = config.get("tie_word_embeddings", True)
    embedding = (1 if tied else 2) * vocab * hidden
    counted = count_parameters(directory)
    if counted is None:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        counted = layers * (attention + 3 * hidden * ffn) + embedding
        source = "config.json"
    else:
        source = "safetensors headers"
    return Shape(
        parameters=counted,
        embedding=embedding,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        source=source,
        context=config.get("max_position_embeddings") or config.get("n_positions") or 0,
    )


def _first_of(config: dict[str, Any], path: Path) -> Any:
    def get(*names: str) -> int:
        for name in names:
            if name in config:
                return int(config[name])
        raise UsageError(
            Finding(
                code="E205",
                what=f"{path} has no {' or '.join(names)}",
                expected="the config.json of a Hugging Face causal language model",
            )
        )

    return get


def count_parameters(directory: Path) -> int | None:
    """Elements of all tensors in the safetensors files; None where there are no such files."""
    total = 0
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        total += sum(math.prod(e["shape"]) for key, e in header.items() if key != "__metadata__")
    return total if files else None


def model_shape(model: Model, near: Path | None = None) -> Shape | None:
    """The shape of a declared model, or None where its files are not on this machine.

    A path such as `shape:qwen2.5-7b` names a public model by its shape alone.
    """
    if model.path.startswith(PREFIX):
        return known_shape(model.path.removeprefix(PREFIX))
    directory = model_directory(model.path, near)
    return None if directory is None else read_shape(directory)


def known_shape(name: str) -> Shape:
    """The shape of a public model, from the table. Raises UsageError for one not in it."""
    widths = known_widths(name)
    return Shape(
        parameters=widths.parameters,
        embedding=widths.embedding,
        layers=widths.layers,
        hidden=widths.hidden,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        ffn=widths.ffn,
        vocab=widths.vocab,
        context=widths.context,
        source=f"the widths of {name}",
    )


def stand_ins(models: Sequence[Model]) -> list[str]:
    """Which models are taken as which public ones, a sentence each, with dtype as declared."""
    found: dict[tuple[str, str], list[str]] = {}
    for model in models:
        if model.path.startswith(PREFIX):
            name = model.path.removeprefix(PREFIX)
            found.setdefault((name, model.dtype), []).append(model.name)
    return [
        f"{' and '.join(names)} taken as {name}, {known_widths(name).parameters / 1e9:.2f} "
        f"billion parameters, in {dtype} as declared"
        for (name, dtype), names in found.items()
    ]


def trained_parameters(model: Model, shape: Shape) -> int | None:
    """How many parameters an update changes: all of them, or the adapters and a new head.

    An adapter of rank r of a layer with inputs n and outputs m has r (n + m) parameters (Hu
    et al. 2021, section 4.1). None where a target is no layer whose widths are known.
    """
    if model.lora is None:
        return shape.parameters
    widths = [shape.linear(name) for name in model.lora.targets]
    sizes = [sum(pair) for pair in widths if pair is not None]
    if len(sizes) < len(widths):
        return None
    head = shape.hidden if model.head == "value" else 0
    return shape.layers * model.lora.rank * sum(sizes) + head


def dtype_bytes(model: Model) -> int:
    """Bytes of one parameter."""
    return DTYPE_BYTES[model.dtype]
