"""What stands for SGLang's kernels where it drafts on a CPU, against plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


def verified(kernels, candidates, likeliest):
    rows, width = candidates.shape
    predicts = torch.zeros(rows * width, dtype=torch.int32)
    places = torch.full((rows, width), -1, dtype=torch.int32)
    right = torch.empty(rows, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=places,
        accept_token_num=right,
        candidates=candidates,
        retrive_index=None,
        retrive_next_token=None,
        retrive_next_sibling=None,
        target_predict=likeliest,
    )
    return predicts, places, right


@given(data=st.data())
def test_drafts_are_kept_up_to_the_first_wrong_one(kernels, data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    draw = st.lists(st.integers(0, 2), min_size=rows * width, max_size=rows * width)
    candidates, likeliest = (torch.tensor(data.draw(draw)).view(rows, width) for _ in range(2))
    predicts, places, right = verified(kernels, candidates, likeliest)
    for row in range(rows):
        count = 0
        while count + 1 < width and candidates[row, count + 1] == likeliest[row, count]:
            count += 1
        assert count == right[row]
        first = row * width
        wanted = [first + place if place <= count else -1 for place in range(width)]
        assert wanted == places[row].tolist()
        made = predicts[first : first + count + 1].tolist()
        assert likeliest[row, : count + 1].tolist() == made


def test_a_chain_sees_itself_and_what_is_before(kernels):
    rows, width = 2, 3
    mask = torch.zeros(rows * width * width, dtype=torch.bool)
    positions, order = torch.zeros(rows * width), torch.zeros(rows, width)
    following, sibling = torch.full((rows, width), -1), torch.full((rows, width), -1)
    kernels.build_tree_kernel_efficient_cpu(
        None, None, torch.tensor([4, 9]), mask, positions, order, following, sibling, 1, 2, 3, 1
    )
    assert [[1, 0, 0], [1, 1, 0], [1, 1, 1]] * 2 == mask.view(-1, width).long().tolist()
    assert [4, 5, 6, 9, 10, 11] == positions.tolist()
    assert [[0, 1, 2], [3, 4, 5]] == order.tolist()
    assert [[1, 2, -1]] * 2 == following.tolist()
    assert [[-1] * 3] * 2 == sibling.tolist()


def test_several_drafts_for_a_place_are_refused(kernels):
    with pytest.raises(RuntimeError, match="several drafts for one place"):
        kernels.build_draft_decode_metadata_cpu(None, None, torch.tensor([1]), 2, 3, 8)


def test_slots_are_noted_and_read_in_a_row(kernels):
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    slots = torch.tensor([11, 12, 13, 14, 15])
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 8)
    assert [0, 11, 12, 0, 0, 0, 0, 0] == table[2].tolist()
    assert [0, 0, 0, 0, 13, 14, 15, 0] == table[0].tolist()
    found = torch.zeros(5, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, found, 8)
    assert slots.tolist() == found.tolist()
    drafts = torch.zeros(4, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, start, drafts, 8, 1, 2)
    assert [11, 12, 13, 14] == drafts.tolist()
    made = kernels.build_draft_decode_metadata_cpu(table, rows, start, 1, 2, 8)
    assert [[0, 11, 12, 0, 0, 0, 0, 0], [0, 0, 0, 0, 13, 14, 0, 0]] == made.tolist()


def test_accepted_tokens_and_slots_are_gathered(kernels):
    bonus = torch.zeros(2, dtype=torch.int64)
    tokens = torch.tensor([5, 6, 7, 8, 9, 10], dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3]), bonus, 3)
    assert [5, 10] == bonus.tolist()
    slots = torch.zeros(4, dtype=torch.int64)
    places = torch.tensor([[0, -1, -1], [3, 4, 5]])
    kernels.fill_accept_out_cache_loc_cpu(places, torch.arange(20, 26), slots)
    assert [20, 23, 24, 25] == slots.tolist()


@pytest.mark.parametrize(("at", "wanted"), [(None, [2, 3, 91, 5, 92]), ([1, 3], [2, 91, 3, 92, 5])])
def test_a_drafter_reads_one_token_further(kernels, at, wanted):
    tokens = torch.tensor([1, 2, 3, 4, 5])
    where = None if at is None else torch.tensor(at)
    follows = torch.tensor([[91], [92]])
    kernels.rotate_input_ids_cpu(tokens, torch.tensor([0, 3]), torch.tensor([3, 2]), follows, where)
    assert wanted == tokens.tolist()


def test_slots_are_copied_in_every_layer(kernels):
    layers = [torch.arange(12.0).view(4, 3), 100 + torch.arange(8.0).view(4, 2)]
    addresses = torch.tensor([layer.data_ptr() for layer in layers])
    sizes = torch.tensor([layer[0].nbytes for layer in layers])
    kernels.copy_all_layer_kv_cache_cpu(
        addresses, sizes, torch.tensor([0, 3]), torch.tensor([3, 1])
    )
    assert [[9, 10, 11], [3, 4, 5], [6, 7, 8], [3, 4, 5]] == layers[0].tolist()
    assert [[106, 107], [102, 103], [104, 105], [102, 103]] == layers[1].tolist()


def test_new_tokens_see_old_ones_and_each_other_by_the_tree(kernels):
    """A token and two drafts for one place, after 2 and 4 tokens: drafts do not see each other."""
    heads, size, lengths = 2, 4, (5, 7)
    source = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(12, heads, size, generator=source) for _ in range(2))
    queries = torch.randn(6, heads, size, generator=source)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).repeat(2, 1, 1)
    table = torch.zeros(2, 8, dtype=torch.int32)
    table[0, :5], table[1, :7] = torch.arange(5), torch.arange(5, 12)
    made = torch.zeros_like(queries)
    kernels.extend_attention_cpu(
        queries,
        None,
        None,
        made,
        keys,
        values,
        None,
        None,
        table,
        torch.arange(2),
        torch.tensor(lengths),
        torch.tensor([3, 3]),
        torch.tensor([0, 3]),
        3,
        0.5,
        0.0,
        False,
        -1,
        None,
        None,
        tree.flatten(),
        True,
    )
    for row, length in enumerate(lengths):
        for place, kept in enumerate(([0], [0, 1], [0, 2])):
            seen = [*range(length - 3), *(length - 3 + each for each in kept)]
            slots = table[row, seen].long()
            wanted = F.scaled_dot_product_attention(
                queries[3 * row + place][:, None],
                keys[slots].transpose(0, 1),
                values[slots].transpose(0, 1),
                scale=0.5,
            )
            torch.testing.assert_close(wanted[:, 0], made[3 * row + place])
