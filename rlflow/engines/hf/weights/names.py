"""What weights are called: by a module, several times where they are tied, and in its files."""

from __future__ import annotations

from typing import Any

from torch import nn

# What GPT-NeoX's files call the head over the vocabulary.
VOCABULARY = {"lm_head.weight": "embed_out.weight"}
# What a model that sees calls its language model; in Qwen2.5-VL's files that is the body itself.
LANGUAGE = "language_model."

# Stacks of experts that published files hold with their last two dimensions turned around, where
# transformers itself writes them as a module has them.
TURNED = {"qwen3_vl_moe": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}


def may_be_turned(name: str, module: Any) -> bool:
    """Whether files may hold a parameter of a module with its last two dimensions turned around."""
    inner = getattr(module, "body", module)
    return name.endswith(TURNED.get(str(inner.config.model_type), ()))


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return found


def repeated_parameters(module: nn.Module) -> set[str]:
    """The names of parameters that are another one's: all but the first of each."""
    kept = dict(module.named_parameters())
    return {name for name, _ in module.named_parameters(remove_duplicate=False)} - kept.keys()


def stored_buffers(module: nn.Module) -> set[str]:
    """The names of buffers that a module's files hold beside its parameters."""
    return module.state_dict().keys() - {
        name for name, _ in module.named_parameters(remove_duplicate=False)
    }


def names_in_file(names: list[str], inner: Any) -> list[str]:
    """What a parameter may be called in a file: with or without the prefix of a model's body."""
    prefix = f"{inner.base_model_prefix}."
    plain = [name.removeprefix("body.") for name in names]
    plain += [VOCABULARY[name] for name in plain if name in VOCABULARY]
    return [
        *plain,
        *(name.removeprefix(prefix) for name in plain),
        *(prefix + name for name in plain),
        *(prefix + name.removeprefix(LANGUAGE) for name in plain if name.startswith(LANGUAGE)),
    ]
