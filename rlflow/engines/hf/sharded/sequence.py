"""Sequence parallelism: between the blocks that `tp` cuts, each rank has its part of the tokens.

Norms and residuals are on 1/tp of the tokens of a packed pass (Korthikanti et al., "Reducing
activation recomputation in large transformer models", arXiv:2205.05198, section 4.2.2). A block's
tokens are gathered before it, and what it makes is summed and shared out after it, as many bytes
as one sum over the ranks. They are kept whole for the backward: to gather them once more there, as
the paper does, would send a quarter more. This file knows no layers but by how they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import packed_tokens
from rlflow.engines.hf.lora import is_adapter
from rlflow.engines.hf.pictures.towers import added_at, picture_places
from rlflow.engines.hf.recompute import body_name
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.engines.hf.sharded.tensor_parallel import Split
from rlflow.engines.hf.sharded.token_parts import FromEveryRank, IntoBlock, ToEveryRank
from rlflow.errors import UsageError, known_names
from rlflow.modelfiles.families import unshared_sequence


def share_sequence(model: ShardedModel, split: Split | None) -> None:
    """Let the ranks of a `split` share the tokens of packed passes; call it on a filled model.

    Raises UsageError E530 where a block has weights that are not cut.
    """
    if split is None:
        return
    module: Any = model.module
    blocks = blocks_of(module, split)
    model.seen_in_part = seen_in_part(model, split, blocks)
    for block in blocks.values():
        block.register_forward_pre_hook(partial(_enter, split), with_kwargs=True)
    body = module.get_submodule(body_name(module))
    body.register_forward_hook(partial(_end, split))
    split.sequence = True
    if model.sight is not None:
        split.embeds_all = True
        body.register_forward_pre_hook(partial(_begin_with_pictures, split), with_kwargs=True)
        body._deepstack_process = partial(_deepened, split)
        return
    inner = getattr(module, "body", module)
    if split.roles.get(inner.get_input_embeddings()) != "vocabulary":
        inner.get_input_embeddings().register_forward_hook(partial(_begin, split))
    if model.stage is not None and model.stage.blank is not None:
        model.stage.blank.register_forward_hook(partial(_begin, split))


def blocks_of(module: nn.Module, split: Split) -> dict[str, nn.Module]:
    """The modules, by name, that projections cut by columns begin: attention, feed-forward."""
    names = {part: known for known, part in module.named_modules()}
    columns = (names[layer] for layer, role in split.roles.items() if role == "columns")
    parents = dict.fromkeys(known.rpartition(".")[0] for known in columns)
    return {parent: module.get_submodule(parent) for parent in parents}


def seen_in_part(
    model: ShardedModel, split: Split, blocks: Mapping[str, nn.Module]
) -> frozenset[str]:
    """Weights of the body that see a rank's own tokens: norms, and biases of what is summed.

    And norms of heads, of which a rank has a part. Gradients are to be added up over the ranks.
    """
    module = model.module
    inner: Any = getattr(module, "body", module)
    prefix = body_name(module)
    embedding = inner.get_input_embeddings().weight
    found: list[str] = []
    wrong: list[str] = []
    for known, weight in module.named_parameters():
        owner = known.rpartition(".")[0]
        role = split.roles.get(module.get_submodule(owner))
        beyond = not f"{known}.".startswith(f"{prefix}." if prefix else "")
        summed_there = role is not None and is_adapter(known)
        if known in model.cuts or beyond or weight is embedding or summed_there:
            continue
        within = any(known.startswith(f"{block}.") for block in blocks)
        (wrong if within and role not in ("rows", "shared") else found).append(known)
    if wrong:
        raise UsageError(unshared_sequence(model.name, known_names(wrong)))
    return frozenset(found)


def _enter(
    split: Split, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a block all tokens."""
    total = packed_tokens()
    if total is None:
        return None
    if args:
        return (_apply(IntoBlock, args[0], split, total), *args[1:]), kwargs
    first = _apply(IntoBlock, kwargs["hidden_states"], split, total)
    return args, kwargs | {"hidden_states": first}


def _begin(split: Split, _: nn.Module, __: tuple[Any, ...], whole: Tensor) -> Tensor | None:
    """Take this rank's tokens of what an embedding that is not cut makes of all."""
    return None if packed_tokens() is None else _apply(FromEveryRank, whole, split)


def _begin_with_pictures(
    split: Split, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take this rank's tokens of those that were embedded, and of pictures among them."""
    if packed_tokens() is None:
        return None
    own = _apply(FromEveryRank, kwargs["inputs_embeds"], split)
    return args, kwargs | {"inputs_embeds": own}


def _deepened(split: Split, hidden: Tensor, _: Tensor, made: Tensor) -> Tensor:
    """A rank's hidden states `[1, part, size]`, with what a tower's layer adds to a picture's.

    Every rank has `made` that of all pictures, or of a blank one that no token stands for, and
    gradients of its own tokens alone.
    """
    places = picture_places()
    if packed_tokens() is None or not len(places):
        return added_at(hidden, places, made)
    start = split.rank * hidden.shape[1]
    own = (places >= start) & (places < start + hidden.shape[1])
    return added_at(hidden, places[own] - start, split.copied(made)[own])


def _end(split: Split, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    """Give every rank all hidden states, as a head asks for those of any tokens."""
    total = packed_tokens()
    if total is not None:
        output.last_hidden_state = _apply(ToEveryRank, output.last_hidden_state, split, total)
    return output


def _apply(function: Any, x: Tensor, split: Split, *more: int) -> Tensor:
    found: Tensor = function.apply(x, split.group, *more)
    return found
