"""How engines name and fuse the parameters of a model: rules that are data.

A rule says which parameters of the source lie one after the other in one of the target. A
shard of a fused parameter under tensor parallelism is the shards of its parts one after the
other, so rank i of n holds the i-th of n equal boxes of the fused parameter. In the patterns
`{p}` stands for any text, the same throughout a rule. This file knows no tensors and no ranks
that send.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlflow.engines.protocol import Box
from rlflow.engines.reshard.boxes import volume, whole
from rlflow.errors import Finding, RunError, near_names

Shape = tuple[int, ...]
Entry = tuple[Shape, str, Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRule:
    """The target's parameter is `parts` of the source, one after the other along `dim`.

    `repeats` are parts that several ranks may hold copies of, where there are more ranks than
    heads of keys and values; each copy then counts in the fused parameter's shape. A rule with
    one part gives a parameter another name.
    """

    target: str
    parts: tuple[str, ...]
    dim: int = 0
    repeats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Parameters that tensor parallelism cuts along `dim`; `repeats` as in a fusion rule."""

    pattern: str
    dim: int
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """The piece `source_box` of a source's parameter, and where in the target's it belongs."""

    source: str
    source_box: Box
    target_box: Box


def _fusions(kind: str) -> tuple[FusionRule, ...]:
    q, k, v, gate, up = (f"{{p}}.{name}_proj.{kind}" for name in ("q", "k", "v", "gate", "up"))
    return (
        FusionRule(target=f"{{p}}.qkv_proj.{kind}", parts=(q, k, v), repeats=(k, v)),
        FusionRule(target=f"{{p}}.gate_up_proj.{kind}", parts=(gate, up)),
    )


# Llama, Mistral, Qwen2 and Qwen3 (dense): parts as Hugging Face names them, fused as SGLang and
# vLLM do.
LLAMA_FUSIONS = (*_fusions("weight"), *_fusions("bias"))

# A model with tied embeddings has no `lm_head.weight` of its own.
TIED_HEAD = FusionRule(target="lm_head.weight", parts=("model.embed_tokens.weight",))

LLAMA_SPLITS = (
    *(
        Split(pattern=f"{{p}}.{name}.{kind}", dim=0, repeats=name in ("k_proj", "v_proj"))
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        for kind in ("weight", "bias")
    ),
    Split(pattern="{p}.o_proj.weight", dim=1),
    Split(pattern="{p}.down_proj.weight", dim=1),
    Split(pattern="{p}.embed_tokens.weight", dim=0),
    Split(pattern="lm_head.weight", dim=0),
)


@lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{p\}", "(?P<p>.+)"))


def text_of(pattern: str, name: str) -> str | None:
    """What `{p}` stands for in `name`, empty where the pattern has none; None: no match."""
    found = _expression(pattern).fullmatch(name)
    return None if found is None else (found.groupdict().get("p") or "")


def filled(pattern: str, text: str) -> str:
    """The pattern with `text` for `{p}`."""
    return pattern.replace("{p}", text)


def slices_of(
    name: str, shape: Shape, box: Box, shapes: Mapping[str, Shape], rules: Sequence[FusionRule]
) -> tuple[Slice, ...]:
    """Where the elements of a target's box lie in the source, whose whole `shapes` are given.

    A name that the source has is itself; any other is made by the first rule whose target it
    matches. Raises RunError (E540, E541, E542) for what cannot be mapped.
    """
    if name in shapes:
        if shape != shapes[name]:
            what = f"parameter {name!r} has another shape in the source"
            raise _error("E541", what, got=str(shape), expected=str(shapes[name]))
        return (Slice(name, box, box),) if volume(box) else ()
    for rule in rules:
        text = text_of(rule.target, name)
        if text is not None:
            return _fused(rule, name, shape, box, _parts(rule, name, text, shapes))
    finding = Finding(
        code="E540",
        what=f"the source has no parameter {name!r}, and no rule makes it",
        near=near_names(name, shapes),
    )
    raise RunError(finding)


def _parts(
    rule: FusionRule, name: str, text: str, shapes: Mapping[str, Shape]
) -> list[tuple[str, Shape]]:
    names = [filled(part, text) for part in rule.parts]
    missing = [part for part in names if part not in shapes]
    if missing:
        what = f"parameter {name!r} is fused of parameters that the source lacks"
        raise _error("E540", what, got=", ".join(missing), expected=", ".join(names))
    return [(part, shapes[part]) for part in names]


def _fused(
    rule: FusionRule, name: str, shape: Shape, box: Box, parts: list[tuple[str, Shape]]
) -> tuple[Slice, ...]:
    if not volume(box):
        return ()
    dim = rule.dim
    copies = _copies(rule, name, shape, parts)
    start, stop = box[dim]
    ranks, rank = shape[dim] // (stop - start), start // (stop - start)
    if shape[dim] % (stop - start) or start % (stop - start):
        what = f"a shard of the fused parameter {name!r} is not one of equal parts"
        raise _error("E542", what, got=f"rows {start} to {stop} of {shape[dim]}")
    found = []
    for (part, whole_shape), copied in zip(parts, copies, strict=True):
        if ranks % copied or whole_shape[dim] % (ranks // copied):
            what = f"{part!r}, a part of {name!r}, does not divide over {ranks} ranks"
            raise _error("E542", what, got=str(whole_shape))
        length = whole_shape[dim] // (ranks // copied)
        low = rank // copied * length
        rows = ((low, low + length), (start, start + length))
        source, target = ((*box[:dim], row, *box[dim + 1 :]) for row in rows)
        found.append(Slice(part, source, target))
        start += length
    return tuple(each for each in found if volume(each.source_box))


def _copies(rule: FusionRule, name: str, shape: Shape, parts: list[tuple[str, Shape]]) -> list[int]:
    """How often the fused shape counts each part, found from the lengths alone."""
    dim = rule.dim
    lengths = [part[dim] for _, part in parts]
    repeated = [pattern in rule.repeats for pattern in rule.parts]
    fixed = sum(length for length, again in zip(lengths, repeated, strict=True) if not again)
    varied = sum(lengths) - fixed
    count = (shape[dim] - fixed) // varied if varied and shape[dim] > fixed else 1
    other = {(*part[:dim], *part[dim + 1 :]) for _, part in parts}
    if fixed + count * varied != shape[dim] or other != {(*shape[:dim], *shape[dim + 1 :])}:
        what = f"the parts of the fused parameter {name!r} do not make up its shape"
        listed = ", ".join(f"{part} {part_shape}" for part, part_shape in parts)
        raise _error("E541", what, got=str(shape), expected=f"{listed} along dimension {dim}")
    return [count if again else 1 for again in repeated]


def tensor_parallel_tables(
    shapes: Mapping[str, tuple[Shape, str]],
    n: int,
    *,
    splits: Sequence[Split] = LLAMA_SPLITS,
    rules: Sequence[FusionRule] = (),
    kv_heads: int | None = None,
) -> tuple[dict[str, Entry], ...]:
    """The table of every rank of TP n: parameter -> (whole shape, dtype name, box).

    `shapes` has the whole shape and the dtype name of the source's parameters. Names that a rule
    fuses are replaced by the fused one, at the place of its first part; a rule whose parts the
    source lacks makes nothing. Where n exceeds `kv_heads`, what `repeats` is held by several
    ranks. Raises RunError (E542) for what n does not divide.
    """
    copies = _kv_copies(n, kv_heads)
    tables: tuple[dict[str, Entry], ...] = tuple({} for _ in range(n))
    fused: set[str] = set()
    for name, (shape, dtype) in shapes.items():
        found = _fusion_of(name, shapes, rules)
        if found is None:
            split = next((s for s in splits if text_of(s.pattern, name) is not None), None)
            held = copies if split is not None and split.repeats else 1
            boxes = _equal_parts(name, shape, None if split is None else split.dim, n, held)
            made, whole_shape = name, shape
        else:
            rule, text = found
            made, whole_shape = filled(rule.target, text), _fused_shape(rule, text, shapes, copies)
            boxes = _equal_parts(made, whole_shape, rule.dim, n, 1)
        if made not in fused:
            fused.add(made)
            for table, box in zip(tables, boxes, strict=True):
                table[made] = (whole_shape, dtype, box)
    return tables


def _kv_copies(n: int, kv_heads: int | None) -> int:
    if kv_heads is None or n <= kv_heads:
        return 1
    if n % kv_heads:
        what = f"{kv_heads} heads of keys and values cannot be shared out over {n} ranks"
        raise _error("E542", what)
    return n // kv_heads


def _fusion_of(
    name: str, shapes: Mapping[str, tuple[Shape, str]], rules: Sequence[FusionRule]
) -> tuple[FusionRule, str] | None:
    for rule in rules:
        for pattern in rule.parts:
            text = text_of(pattern, name)
            if text is not None and all(filled(part, text) in shapes for part in rule.parts):
                return rule, text
    return None


def _fused_shape(
    rule: FusionRule, text: str, shapes: Mapping[str, tuple[Shape, str]], copies: int
) -> Shape:
    first = shapes[filled(rule.parts[0], text)][0]
    counts = [copies if pattern in rule.repeats else 1 for pattern in rule.parts]
    lengths = [shapes[filled(pattern, text)][0][rule.dim] for pattern in rule.parts]
    total = sum(count * length for count, length in zip(counts, lengths, strict=True))
    return (*first[: rule.dim], total, *first[rule.dim + 1 :])


def _equal_parts(name: str, shape: Shape, dim: int | None, n: int, copies: int) -> list[Box]:
    """The box of every rank; each part is held by `copies` ranks in a row."""
    box = whole(shape)
    if dim is None:
        return [box] * n
    length, rest = divmod(shape[dim], n // copies)
    if rest:
        raise _error("E542", f"{name!r} does not divide over {n} ranks", got=str(shape))
    starts = [rank // copies * length for rank in range(n)]
    return [(*box[:dim], (low, low + length), *box[dim + 1 :]) for low in starts]


def _error(code: str, what: str, *, got: str = "", expected: str = "") -> RunError:
    return RunError(Finding(code=code, what=what, got=got, expected=expected))
