"""Bookkeeping of speculative decoding in plain torch, for chains of drafts.

A chain has one draft at each place (`speculative_eagle_topk=1`): SGLang's tree of drafts is then
the last token of a row and its drafts, one after the other. The names and signatures are those that
SGLang calls. This file knows no attention.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

QLEN_ONLY = 1


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Note the slots of the tokens from `start` to `end` of each sequence; they lie in a row."""
    del pool_len
    first = 0
    for row, begin, last in zip(
        req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True
    ):
        count = last - begin
        req_to_token[row, begin:last] = out_cache_loc[first : first + count].to(req_to_token.dtype)
        first += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    pool_len: int,
) -> None:
    """Write to `out` the slots of the tokens from `start` to `end` of each sequence, in a row."""
    del pool_len
    bounds = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, begin:last] for row, begin, last in bounds])
    out[: len(slots)] = slots.to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Write to `out` the slots of `steps` drafts after each sequence."""
    ends = seq_lens + topk * steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out, pool_len)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus: Tensor, stride: int
) -> None:
    """The last token that each row of `accept_tokens [rows, stride]` has accepted."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus.copy_(accept_tokens.reshape(-1)[last].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots of the accepted tokens, whose places are not -1, in a row."""
    places = accept_index.reshape(-1)
    slots = out_cache_loc[places[places > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor
) -> None:
    """Copy slots of keys and values to others, in every layer: of so many bytes, by address."""
    places, slots = target.tolist(), source.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(address + slot * size, size) for slot in slots]
        for place, content in zip(places, held, strict=True):
            ctypes.memmove(address + place * size, content, size)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    start_loc: Tensor,
    seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each sequence left by one token; the one that follows it goes to its end.

    With `select_index` it goes there instead.
    """
    follows = topk_index.reshape(-1)
    for row, (first, count) in enumerate(zip(start_loc.tolist(), seq_lens.tolist(), strict=True)):
        if count:
            last = first + count - 1
            input_ids[first:last] = input_ids[first + 1 : last + 1].clone()
            input_ids[last if select_index is None else int(select_index[row])] = follows[row]


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    steps: int,
    pool_len: int,
) -> Tensor:
    """The slots of each sequence and its drafts, `[rows, pool_len]`."""
    chains_only(topk)
    made = torch.zeros(len(seq_lens), pool_len, dtype=req_to_token.dtype)
    for row, (held, count) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        made[row, : count + steps] = req_to_token[held, : count + steps]
    return made


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write which of a row's last token and drafts see which, their positions and their order."""
    del parent_list, selected_index, depth, retrieve_next_sibling
    chains_only(topk)
    if int(tree_mask_mode) != QLEN_ONLY:
        raise RuntimeError("masks over whole sequences: not on this CPU")
    rows, width = len(seq_lens), num_verify_tokens
    before = torch.ones(width, width, dtype=torch.bool).tril()
    tree_mask.view(-1)[: rows * width * width].view(rows, width, width)[:] = before
    places = torch.arange(width)
    positions.view(rows, width)[:] = seq_lens[:, None] + places
    retrieve_index.view(rows, width)[:] = torch.arange(rows * width).view(rows, width)
    following = torch.where(places + 1 < width, places + 1, -1)
    retrieve_next_token.view(rows, width)[:] = following


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the drafts of each row up to the first that is not the likeliest token.

    `candidates [rows, width]` are the last token and its drafts, `target_predict` the likeliest
    token after each. Writes to `predicts` what follows each accepted token, to `accept_index`
    their places, and how many drafts were right.
    """
    del retrive_index, retrive_next_token, retrive_next_sibling
    rows, width = candidates.shape
    likeliest = target_predict.view(rows, width)
    right = (candidates[:, 1:] == likeliest[:, :-1]).long().cumprod(1)
    kept = torch.cat([torch.ones(rows, 1, dtype=torch.bool), right.bool()], 1)
    kept = kept[:, : accept_index.shape[1]]
    places = torch.arange(rows * width).view(rows, width)[:, : kept.shape[1]]
    accept_index[:, : kept.shape[1]] = torch.where(kept, places, -1).to(accept_index.dtype)
    accept_token_num.copy_(kept.sum(1) - 1)
    predicts[places[kept]] = likeliest[:, : kept.shape[1]][kept].to(predicts.dtype)


def chains_only(topk: int) -> None:
    """Refuse trees of drafts."""
    if topk != 1:
        raise RuntimeError("several drafts for one place: not on this CPU")


def seen_in_tree(tree: Any, keys: Tensor, added: Tensor, width: int) -> Tensor:
    """Which keys each new token sees, bool `[rows, new, width]`: all old ones, new ones by `tree`.

    `tree [rows, new, new]` says whether a new token sees another.
    """
    rows, new, _ = tree.shape
    place = torch.arange(width)[None, None] - (keys - added)[:, None, None]
    place = place.expand(rows, new, width)
    inside = (place >= 0) & (place < new)
    return torch.where(inside, tree.gather(2, place.clamp(0, new - 1)), place < 0)
