"""Where a model's files keep the head that gives one number a token, if they do.

Reward models and critics are kept as `AutoModelForSequenceClassification` of transformers
(`score.weight`), its `AutoModelForTokenClassification` (with a bias), TRL's
`AutoModelForCausalLMWithValueHead` (`v_head.summary`), `v_head` or `value_head`, or as the two
layers of Qwen2.5-Math-RM (`score.0`, ReLU, `score.2`). A head of another name is known by its
shape. What would change the score and is not understood is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, known_names
from rlflow.modelfiles.configs import text_value
from rlflow.modelfiles.headers import Shape

# In the order in which they are believed.
NAMES = ("score", "v_head.summary", "v_head", "value_head", "classifier", "reward_head", "rm_head")
# What a body, and a head over the vocabulary, are called in files.
BODIES = {
    "model", "transformer", "gpt_neox", "backbone", "language_model", "base_model", "decoder",
    "embed_tokens", "layers", "norm", "wte", "wpe", "h", "ln_f", "embed_in", "final_layer_norm",
    "emb_ln", "word_embeddings", "word_embeddings_layernorm", "rotary_emb", "embed_positions",
}  # fmt: skip
VOCABULARY = {"lm_head", "embed_out"}
# Architectures whose `score` is known to be a linear layer, ReLU, and a linear layer.
RELU_BETWEEN = {"Qwen2ForRewardModel"}
STEP = re.compile(r"(.+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head in a model's files: its layers by name, first to last, with ReLU between them.

    `sizes` are the outputs of each layer, `biases` whether each adds a bias; `by_shape` says
    that its name is none that the field uses.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    biases: tuple[bool, ...]
    by_shape: bool = False

    @property
    def name(self) -> str:
        """What the head is called in the files."""
        if len(self.layers) == 1:
            return self.layers[0]
        return self.layers[0].rpartition(".")[0]

    def stored(self) -> dict[str, str]:
        """What each of its parameters is called in the files, by its name within the head."""
        found = {}
        for place, layer in enumerate(self.layers):
            inside = "" if len(self.layers) == 1 else f"{2 * place}."
            found[f"{inside}weight"] = f"{layer}.weight"
            if self.biases[place]:
                found[f"{inside}bias"] = f"{layer}.bias"
        return found


def find_head(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], path: str | Path, *, fresh: bool
) -> tuple[Head | None, list[Finding]]:
    """The head among a model's tensors, and what is wrong with it.

    None without findings is a head that may start `fresh`, as that of a model that is trained
    may. E524: there is none, and it may not. E525: there is one of a form that is not known.
    """
    hidden = text_value(config, "hidden_size", "n_embd", "d_model")
    beside = sorted(beside_body(shapes))
    head = layered_head(shapes, beside) or single_head(shapes, beside, hidden)
    if head is None:
        wrong = [name for name in beside if known_name(name)]
        if wrong or (beside and not fresh):
            return None, [_unknown(path, shapes, wrong or beside)]
        return None, [] if fresh else [_missing(path)]
    used = set(head.stored().values())
    others = [name for name in beside if name not in used]
    if others and not fresh:
        return None, [_unknown(path, shapes, others)]
    return head, _misfits(path, head, shapes, config, hidden)


def beside_body(names: Iterable[str]) -> list[str]:
    """The tensors that are neither the body's nor those of a head over the vocabulary."""
    return [name for name in names if name.partition(".")[0] not in BODIES | VOCABULARY]


def known_name(name: str) -> bool:
    """Whether a tensor is called what heads are called."""
    return any(name.startswith(f"{known}.") for known in NAMES)


def layered_head(shapes: Mapping[str, Shape], beside: list[str]) -> Head | None:
    """A head of several layers, `score.0` and so on; None where there is none."""
    for known in NAMES:
        places = [
            (int(found[2]), found[0])
            for name in beside
            if name.endswith(".weight") and len(shapes[name]) == 2
            if (found := STEP.fullmatch(name.removesuffix(".weight"))) and found[1] == known
        ]
        if places:
            return made([layer for _, layer in sorted(places)], shapes)
    return None


def single_head(shapes: Mapping[str, Shape], beside: list[str], hidden: int) -> Head | None:
    """A head of one layer: of a known name, or the only one with the shape of a head."""
    for known in NAMES:
        if f"{known}.weight" in beside:
            return made([known], shapes)
    fits = [name for name in beside if name.endswith(".weight") and shapes[name] == (1, hidden)]
    if len(fits) != 1:
        return None
    return made([fits[0].removesuffix(".weight")], shapes, by_shape=True)


def made(layers: list[str], shapes: Mapping[str, Shape], *, by_shape: bool = False) -> Head:
    """The head of some layers."""
    return Head(
        layers=tuple(layers),
        sizes=tuple(shapes[f"{layer}.weight"][0] for layer in layers),
        biases=tuple(f"{layer}.bias" in shapes for layer in layers),
        by_shape=by_shape,
    )


def _misfits(
    path: str | Path,
    head: Head,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    hidden: int,
) -> list[Finding]:
    """What is wrong with a head that was found."""
    if head.sizes[-1] != 1:
        return [_labels(path, head)]
    inputs, wanted = [shapes[f"{layer}.weight"] for layer in head.layers], (hidden, *head.sizes)
    chained = all(
        shape == (out, into) for shape, out, into in zip(inputs, head.sizes, wanted, strict=False)
    )
    named = set(config.get("architectures") or ())
    if not chained or len(head.layers) > 2 or (len(head.layers) == 2 and not named & RELU_BETWEEN):
        return [_unknown(path, shapes, list(head.stored().values()))]
    return []


def _missing(path: str | Path) -> Finding:
    """E524: a frozen model has no head to score with."""
    return Finding(
        code="E524",
        what=f"{str(path)!r} holds no head that gives one number a token, and nothing trains one",
        got="a language model's weights, which would score 0 everywhere",
        expected="a reward model or a critic: " + ", ".join(f"{name}.weight" for name in NAMES[:4]),
        fix="optimizer=rf.AdamW(lr=...)   where a fresh head is to be trained",
    )


def _labels(path: str | Path, head: Head) -> Finding:
    return Finding(
        code="E525",
        what=f"the head {head.name!r} of {str(path)!r} gives {head.sizes[-1]} numbers a token",
        got=f"{head.layers[-1]}.weight with {head.sizes[-1]} rows",
        expected="one: AutoModelForSequenceClassification with num_labels=1",
    )


def _unknown(path: str | Path, shapes: Mapping[str, Shape], names: list[str]) -> Finding:
    listed = [f"{name} {list(shapes[name])}" for name in names[:6]]
    return Finding(
        code="E525",
        what=f"{str(path)!r} scores with a head of a form that rlflow does not compute",
        got=known_names(listed),
        expected="a linear layer to one number, or two with ReLU between them as in "
        "Qwen2ForRewardModel; and nothing else beside the body",
        fix="score with it in a function of your own: ops.reward(my_function, samples)",
    )


def note_of(head: Head | None) -> str:
    """Where a head comes from, in words."""
    if head is None:
        return "fresh: its files hold none"
    names = " and ".join(f"{layer}.weight" for layer in head.layers)
    return f"{names} of its files" + (", known by its shape alone" if head.by_shape else "")
