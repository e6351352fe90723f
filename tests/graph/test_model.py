"""Models with adapters: what is refused, how they print, what they leave as it was."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.graph.text import graph_text

ADAM = rf.AdamW(lr=1e-3)


def trained(**options):
    @rf.pipeline()
    def declared(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=ADAM, **options)
        prompts = ops.prompts(rf.data.arithmetic(), batch=4)
        written = ops.tokenize(actor, prompts, response="answer")
        ops.update(actor, written, loss=rf.SFTLoss())

    return declared.trace()


def test_adapters_are_printed_after_the_optimizer():
    graph = trained(lora=rf.LoRA(rank=4, alpha=0.5, targets=("q_proj", "o_proj")))

    line = "some/model  adamw(lr=0.001)  lora(rank=4, alpha=0.5, targets=q_proj+o_proj)"
    assert f"  actor  {line}\n" in graph_text(graph)


def test_adapters_are_part_of_the_graph_and_their_absence_is_not():
    plain, small, large = (trained(), trained(lora=rf.LoRA()), trained(lora=rf.LoRA(rank=9)))

    assert 3 == len({plain.hash, small.hash, large.hash})
    assert small.hash == trained(lora=rf.LoRA(rank=8)).hash
    assert "lora" not in plain.to_json()["models"][0]
    dumped = large.to_json()["models"][0]["lora"]
    assert {"rank": 9, "alpha": 16.0, "targets": ["q_proj", "v_proj"]} == dumped
    assert rf.LoRA(rank=9) == rf.LoRA(**dumped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than 0"),
        ({"targets": ()}, "at least 1 item"),
        ({"targets": "q_proj"}, r"targets=\('q_proj',\)"),
        ({"ranks": 8}, "Extra inputs"),
    ],
)
def test_impossible_adapters_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        rf.LoRA(**options)


def test_frozen_parts_are_part_of_the_graph_in_any_order():
    plain, tower = trained(), trained(freeze="vision")
    both = trained(freeze=("vision", "projector"))

    assert 3 == len({plain.hash, tower.hash, both.hash})
    assert both.hash == trained(freeze=["projector", "vision"]).hash
    assert "freeze" not in plain.to_json()["models"][0]
    assert "adamw(lr=0.001)  freeze=projector+vision\n" in graph_text(both)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "vision"}, "it needs optimizer="),
        ({"freeze": ("vision",), "lora": rf.LoRA(), "optimizer": rf.AdamW(lr=1)}, "adapters alone"),
        ({"freeze": 3, "optimizer": rf.AdamW(lr=1)}, r'parts.*: "vision", "projector", or a tuple'),
        ({"freeze": ("vision", 3), "optimizer": rf.AdamW(lr=1)}, 'parts.*"projector"'),
    ],
)
def test_impossible_frozen_parts_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        rf.Model("actor", "x", **options)


def test_adapters_need_an_optimizer_and_the_message_names_the_line():
    @rf.pipeline()
    def declared(cfg: rf.Config) -> None:
        rf.Model("actor", "x", lora=rf.LoRA())

    with pytest.raises(GraphError) as caught:
        declared.trace()

    (found,) = caught.value.findings
    assert "lora= says what is trained, so it needs optimizer=" in found.what
    assert 'rf.Model("actor"' in found.where.text
