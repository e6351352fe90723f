"""Generation by several ranks: tokens of one rank, and ranks that never part."""

from __future__ import annotations

import pytest

from tests.engines import sharded_rollouts as rollouts

pytestmark = pytest.mark.torch


def in_all(world, function, path, shape, *args):
    return world(shape[0] * shape[1] * shape[2]).run(function, path, shape, *args)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("shape", "family", "trained"),
    [
        pytest.param((1, 1, 2), "qwen2", False, id="tp2"),
        pytest.param((1, 1, 2), "qwen3", True, id="tp2-trained"),
        pytest.param((1, 2, 1), "llama", True, id="fsdp2-trained"),
        pytest.param((1, 2, 1), "qwen3", False, id="fsdp2"),
        pytest.param((2, 1, 2), "mistral", False, id="dp2xtp2"),
        pytest.param((1, 2, 2), "qwen2", True, id="fsdp2xtp2-trained"),
    ],
)
def test_tokens_are_those_of_one_rank(shape, family, trained, world, model_dir):
    assert all(in_all(world, rollouts.same_tokens, model_dir(family), shape, trained))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("shape", "family", "trained"),
    [
        pytest.param((1, 1, 2), "qwen3", False, id="tp2"),
        pytest.param((1, 2, 1), "llama", True, id="fsdp2-trained"),
        pytest.param((1, 2, 2), "qwen2", True, id="fsdp2xtp2-trained"),
    ],
)
def test_tokens_on_a_pool_of_blocks_are_those_of_one_rank(shape, family, trained, world, model_dir):
    assert all(in_all(world, rollouts.same_tokens, model_dir(family), shape, trained, True))


def test_pieces_on_a_pool_of_blocks_are_the_whole(world, model_dir):
    path = model_dir("qwen2")

    found = in_all(world, rollouts.same_pieces, path, (1, 1, 2), False, 3, True)

    assert all(sizes > 2 for sizes in found)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("shape", "trained", "count"),
    [
        pytest.param((1, 1, 2), False, 3, id="tp2"),
        pytest.param((1, 2, 1), True, 4, id="fsdp2-trained"),
        pytest.param((1, 2, 2), True, 5, id="fsdp2xtp2-trained"),
    ],
)
def test_pieces_are_the_whole(shape, trained, count, world, model_dir):
    found = in_all(world, rollouts.same_pieces, model_dir("qwen2"), shape, trained, count)
    assert all(sizes > 2 for sizes in found)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)])
def test_ranks_of_a_part_have_equal_logits(shape, world, model_dir):
    assert all(in_all(world, rollouts.same_logits, model_dir("llama"), shape))


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1)])
def test_training_goes_on_as_if_nothing_had_been_generated(shape, world, model_dir):
    assert all(in_all(world, rollouts.training_goes_on_after, model_dir("qwen2"), shape))


# Between windows of 8 tokens the host hears of a window what was said after the one before.
@pytest.mark.parametrize(
    ("paged", "new_tokens", "made"), [(False, 12, 4), (True, 60, 33)], ids=["columns", "blocks"]
)
def test_the_first_rank_decides_on_tokens_and_stops(paged, new_tokens, made, world, model_dir):
    options = paged, new_tokens
    found = in_all(world, rollouts.first_rank_decides, model_dir("qwen2"), (1, 1, 2), *options)

    assert [[made] * 8] * 2 == found


def test_replays_are_of_the_weights_that_were_gathered(world, model_dir):
    found = in_all(world, rollouts.gathered_weights_are_read, model_dir("qwen2"), (1, 2, 1))

    assert sum(pieces for pieces, _, _ in found) == found[0][1]
    assert all(whole == every for _, whole, every in found)
