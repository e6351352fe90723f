"""What SGLang is asked where prompts have pictures, without an engine."""

from __future__ import annotations

import pytest
import torch

from rlflow.engines.hf.pictures.passes import forward_inputs
from rlflow.engines.process.server.rlflow_engine_process.sglang_rows import Generating
from rlflow.engines.process.sglang.checksums import weight_layout
from rlflow.engines.process.sglang.pictures import sent_pictures
from rlflow.modelfiles.pictures.sights import sight_of
from tests.engines.seeing import PART, write_seeing
from tests.engines.test_pictures import seen_prompts

pytestmark = pytest.mark.torch


def test_prompts_come_with_what_the_trained_forward_takes_of_their_pictures(tmp_path):
    import transformers

    path = write_seeing(tmp_path, "qwen3_vl")
    config = transformers.AutoConfig.from_pretrained(path).to_dict()
    sight = sight_of(tmp_path, config)
    prompts, pictures = seen_prompts(path)
    sent = sent_pictures(sight, prompts, pictures)
    given = [(row.tolist(), each) for row, each in zip(prompts.unbind(), sent, strict=True)]
    asked = Generating.shown(None, given, several=True)["image_data"]

    assert [1, 1, 1, 0] == [len(each) for each in asked]
    two = asked[2][0]
    pixels, shapes = pictures.pixels.unbind()[2], pictures.shapes.unbind()[2]
    assert "processor_output" == two["format"]
    for name, value in forward_inputs(sight, pixels, shapes).items():
        assert torch.equal(value, two[name])
    # Pictures of 4 x 1 and 2 x 2 tokens; the second begins four positions on, and two of text.
    turned, tokens = two["mrope_positions"], prompts.unbind()[2]
    seen = turned[:, tokens == PART].tolist()
    assert [[5] * 4 + [11] * 4, [5, 6, 7, 8] + [11] * 2 + [12] * 2] == seen[:2]
    assert int(turned[0, -1]) + 1 - len(tokens) == int(two["mrope_position_delta"])
    (one,) = Generating.shown(None, [given[0]], several=False)["image_data"]
    assert torch.equal(one["image_grid_thw"], pictures.shapes.unbind()[0])
    assert {} == Generating.shown(None, [given[3]], several=False)


def test_a_tower_and_the_model_beside_it_are_known_by_the_engines_names():
    attention = [f"model.language_model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    names = ["model.visual.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight"]
    staged = dict.fromkeys([*names, *attention, "model.language_model.norm.weight"], torch.ones(16))
    held = ["visual.blocks.0.attn.qkv_proj.weight", "visual.pos_embed.weight", "model.norm.weight"]
    found = weight_layout([*held, "model.layers.0.self_attn.qkv_proj.weight"], staged)

    parts = [[part for part, *_ in pieces] for pieces, *_ in found.values()]
    assert [*([name] for name in (*names, "model.language_model.norm.weight")), attention] == parts
    assert 48 == found["visual.pos_embed.weight"][1]


def test_projectors_beside_towers_are_known_in_files_of_both_kinds():
    """Of a model that has all names of a kind, each is in what an engine holds."""
    tiles = {
        "mlp1.1.weight": "multi_modal_projector.linear_1.weight",
        "vision_model.embeddings.patch_embedding.bias": (
            "vision_tower.embeddings.patch_embeddings.projection.bias"
        ),
        "vision_model.encoder.layers.0.attn.attn.proj.bias": (
            "vision_tower.encoder.layer.0.attention.projection_layer.bias"
        ),
        "vision_model.encoder.layers.0.ls2": "vision_tower.encoder.layer.0.lambda_2",
        "language_model.model.norm.weight": "language_model.model.norm.weight",
        "language_model.lm_head.weight": "language_model.lm_head.weight",
    }
    fronts = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    later = {}
    for held, file in tiles.items():
        front = next((front for front in fronts if file.startswith(front)), "")
        later[held] = fronts.get(front, "model.") + file.removeprefix(front)
    for names in (tiles, later):
        staged = dict.fromkeys(names.values(), torch.ones(64, 1))
        found = weight_layout(names, staged)
        assert {name: [file] for name, file in names.items()} == {
            name: [part for part, *_ in pieces] for name, (pieces, *_) in found.items()
        }


def test_ranks_have_their_heads_of_a_tower_and_their_part_of_what_leads_out():
    sizes = {"attn.qkv": (12, 4), "attn.proj": (4, 4), "mlp.linear_fc1": (8, 4)}
    staged = {f"model.visual.blocks.0.{name}.weight": torch.ones(n) for name, n in sizes.items()}
    staged["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3)
    held = [name.removeprefix("model.").replace("qkv", "qkv_proj") for name in staged]
    found = weight_layout(held, staged, 1, 2)

    cut = [[piece[1:] for piece in pieces] for pieces, *_ in found.values()]
    assert [[(0, 2, 4), (0, 6, 8), (0, 10, 12)], [(1, 2, 4)], [(0, 4, 8)], [(0, 0, 4)]] == cut
