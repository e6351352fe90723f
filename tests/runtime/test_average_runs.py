"""Runs whose reference is an average of the actor: its weights by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.runtime.whole_checkpoints import joined
from tests.runtime.whole_runs import AVERAGED, numbers, plan_of, tensors

pytestmark = pytest.mark.torch


@pytest.fixture
def run(train):
    """A run with some settings; its components by iteration and name."""

    def made(*words, placement="together", **options):
        said = [word for item in options.items() for word in ("--set", "{}={}".format(*item))]
        return Saved(train(AVERAGED, placement, *words, *said))

    return made


class Saved:
    """A run whose checkpoints are read: a component by its iteration and name."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def __call__(self, iteration: int, name: str) -> dict[str, Any]:
        found = joined(self.run / "checkpoints" / f"iteration-{iteration:06}")
        return {key.removeprefix(f"{name}/"): found[key] for key in found if f"{name}/" in key}


def same(one, other) -> bool:
    """Whether two components have the same bits under the same names."""
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


def first() -> dict[str, Any]:
    """The weights that every run begins with; the head is tied to the embedding."""
    from safetensors.torch import load_file

    tensors = load_file(TINY / "model.safetensors")
    tensors.pop("lm_head.weight")
    return tensors


def moved(w, theta, decay):
    return {name: decay * w[name].double() + (1 - decay) * theta[name].double() for name in w}


def apart(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def difference(one, other) -> float:
    """The Euclidean norm of what two components differ by, all their weights taken together."""
    assert one.keys() == other.keys()
    return sum(float((one[n].double() - other[n].double()).square().sum()) for n in one) ** 0.5


def components(saved: Saved) -> list[str]:
    return sorted({name.partition("/")[0] for name in tensors(saved.run)})


@pytest.mark.slow
def test_the_average_is_that_of_a_plain_loop_over_the_weights_of_every_iteration(run):
    early, late = run("--iterations", 1), run()
    expected = first()
    for theta in (early(1, "actor"), late(2, "actor"), late(3, "actor")):
        expected = moved(expected, theta, 0.9)
    assert apart(expected, late(3, "ref")) < 1e-6
    assert apart(first(), late(3, "ref")) > 1e-3


@pytest.mark.slow
def test_of_every_second_iteration_the_others_leave_it_as_it_is(run):
    found = run(every=2)
    assert apart(moved(first(), found(2, "actor"), 0.9), found(2, "ref")) < 1e-7
    assert same(found(2, "ref"), found(3, "ref"))
    assert not same(found(2, "actor"), found(3, "actor"))


@pytest.mark.slow
def test_without_decay_it_is_the_actor_and_the_kl_is_nothing(run):
    found = run(decay=0)
    assert same(found(3, "actor"), found(3, "ref"))
    assert not same(found(3, "actor"), first())
    assert [0.0] * 3 == [line["actor.update/kl"] for line in numbers(found.run)]


@pytest.mark.slow
def test_with_full_decay_it_is_a_frozen_reference(run):
    found, expected = run(decay=1), run(frozen=True)
    assert same(expected(3, "actor"), found(3, "actor"))
    assert same(first(), found(3, "ref"))
    assert ["actor", "actor.optimizer"] == components(expected)


@pytest.mark.slow
def test_weights_that_sleep_while_the_actor_learns_are_the_same(run):
    expected, found = run(), run("--devices", "cpu:1@8MB")
    assert ["actor", "actor.optimizer", "ref"] == components(expected)
    assert tensors(expected.run) == tensors(found.run)
    slept = [a["id"] for a in plan_of(found.run)["actions"] if a["kind"] == "sleep"]
    assert "sleep:ref@all/weights" in {name.partition("#")[0] for name in slept}


@pytest.mark.slow
def test_of_adapters_each_half_is_averaged_by_itself(run):
    found = run(rank=2, decay=0.5)
    assert all(name.endswith(("lora_A", "lora_B")) for name in found(3, "ref"))
    expected = moved(found(2, "ref"), found(3, "actor"), 0.5)
    assert apart(expected, found(3, "ref")) < 1e-7
    assert apart(found(2, "ref"), found(3, "ref")) > 1e-3


@pytest.mark.slow
def test_of_weights_in_bfloat16_it_is_a_float32_average(run):
    found = run(dtype="bfloat16")
    assert {"torch.float32"} == {str(w.dtype) for w in found(3, "ref").values()}
    # A checkpoint has what bfloat16 weights are trained on; the weights are that, rounded.
    rounded = {name: w.bfloat16() for name, w in found(3, "actor").items()}
    expected = moved(found(2, "ref"), rounded, 0.9)
    assert apart(expected, found(3, "ref")) < 1e-7


def test_its_weights_are_exported(run, rlflow, tmp_path):
    from safetensors.torch import load_file

    found = run()
    done = rlflow("export", found.run, "--model", "ref", "-o", tmp_path / "exported")
    assert 0 == done.code, done.err
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(same({name: w}, {name: written[name]}) for name, w in found(3, "ref").items())


def test_a_model_of_other_widths_is_refused_with_what_differs(train, tmp_path):
    shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    other = ("--set", f"other={tmp_path / 'other'}")
    done = train.begun(tmp_path / "run", AVERAGED, "together", *other)
    assert 4 == done.code
    assert "E272" in done.err
    assert "layers 1 and" in done.err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("together", marks=pytest.mark.extra),
        "fsdp",
        pytest.param("tp", marks=pytest.mark.extra),
    ],
)
def test_ranks_average_their_shards(run, train, tmp_path, placement):
    """The blend needs no other rank: of what the ranks have learned it is the plain loop's."""
    words = ("--backend", "ray", "--check-sync")
    whole, cut = run(*words, placement=placement), tmp_path / "cut"
    assert 0 == train.begun(cut, AVERAGED, placement, *words, "--iterations", 1).code
    assert tensors(whole.run) == tensors(train.resumed(cut, AVERAGED, placement, *words))
    assert apart(moved(whole(2, "ref"), whole(3, "actor"), 0.9), whole(3, "ref")) < 1e-7
    # Adam divides by a gradient's own size: where that is nearly zero, rounding moves single
    # weights by a share of the learning rate, and the others by nothing that is seen in the norm.
    alone = run()(3, "ref")
    share = difference(alone, whole(3, "ref")) / difference(alone, first())
    assert share == 0 if placement == "together" else share < 1e-3
