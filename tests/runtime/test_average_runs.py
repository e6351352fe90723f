"""Runs whose reference is an average of the actor: its weights by hand, everywhere the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlflow.runtime.checkpoint import load_checkpoint
from rlflow.runtime.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

FILE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    decay: float = 0.9
    every: int = 1
    frozen: bool = False
    rank: int = 0
    dtype: str = "float32"
    other: str = "MODEL"


def mixed(response: str) -> float:
    return sum(ord(letter) for letter in response) % 7 / 7


@rf.pipeline(placements={
    "together": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
    "split": rf.Placement(
        pools={"a": 1, "b": 1}, assign={"*": rf.on("b"), "actor.train": rf.on("a")}
    ),
    "fsdp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
    "tp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tp=2)}),
})
def averaged(cfg: Config) -> None:
    lora = rf.LoRA(rank=cfg.rank, targets=("q_proj", "down_proj")) if cfg.rank else None
    adam, mean = rf.AdamW(lr=1e-2), rf.Average(decay=cfg.decay)
    actor = rf.Model("actor", "MODEL", optimizer=adam, lora=lora, dtype=cfg.dtype)
    ref = rf.Model("ref", "MODEL") if cfg.frozen else rf.Model(
        "ref", cfg.other, optimizer=mean, lora=lora
    )
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=2), n=4, max_new_tokens=4)
    given = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, ops.reward(mixed, samples))
    ops.update(actor, samples, adv, given, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.1))
    if not cfg.frozen:
        ops.average(ref, actor, every=cfg.every)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    (folder / "averaged.py").write_text(FILE.replace("MODEL", str(TINY)))
    return folder


@pytest.fixture
def run(rlflow, home, monkeypatch):
    """Run the pipeline in a directory of that name, once; what its iterations ended with."""
    monkeypatch.chdir(home)

    def made(name, iterations, *words, **options):
        if not (home / name).exists() or "--resume" in words:
            said = [word for item in options.items() for word in ("--set", "{}={}".format(*item))]
            fixed = ("-q", "--threads", 1, "--iterations", iterations, "--run-dir", name)
            every = ("--save-every", 1)
            done = rlflow("run", "averaged.py", *fixed, *every, *words, *said)
            assert 0 == done.code, done.err
        return Saved(home / name / "checkpoints")

    return made


class Saved:
    """The two newest checkpoints of a run; a component by its iteration and name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, iteration: int, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"iteration-{iteration:06}" / f"{name}.safetensors")

    def names(self) -> list[str]:
        return sorted(load_checkpoint(self.folder).components)


def first() -> dict[str, Any]:
    """The weights that every run begins with; the head is tied to the embedding."""
    from safetensors.torch import load_file

    tensors = load_file(TINY / "model.safetensors")
    tensors.pop("lm_head.weight")
    return tensors


def same(one, other) -> bool:
    """Whether two components have the same bits under the same names."""
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


def moved(w, theta, decay):
    return {name: decay * w[name].double() + (1 - decay) * theta[name].double() for name in w}


def apart(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_the_average_is_that_of_a_plain_loop_over_the_weights_of_every_iteration(run):
    early, late = run("one", 1), run("three", 3)
    expected = first()
    for theta in (early(1, "actor"), late(2, "actor"), late(3, "actor")):
        expected = moved(expected, theta, 0.9)
    assert apart(expected, late(3, "ref")) < 1e-6
    assert apart(first(), late(3, "ref")) > 1e-3


def test_of_every_second_iteration_the_others_leave_it_as_it_is(run):
    found = run("second", 3, every=2)
    assert apart(moved(first(), found(2, "actor"), 0.9), found(2, "ref")) < 1e-7
    assert same(found(2, "ref"), found(3, "ref"))
    assert not same(found(2, "actor"), found(3, "actor"))


def test_without_decay_it_is_the_actor_and_the_kl_is_nothing(run, home):
    found = run("copied", 3, decay=0)
    assert same(found(3, "actor"), found(3, "ref"))
    assert not same(found(3, "actor"), first())
    lines = read_metrics(home / "copied" / "metrics.jsonl")
    assert [0.0] * 3 == [line.metrics["actor.update/kl"] for line in lines]


def test_with_full_decay_it_is_a_frozen_reference(run):
    found, expected = run("kept", 3, decay=1), run("frozen", 3, frozen=True)
    assert same(expected(3, "actor"), found(3, "actor"))
    assert same(first(), found(3, "ref"))
    assert ["actor", "actor.optimizer"] == expected.names()


def test_a_placement_changes_nothing(run):
    expected, found = run("three", 3), run("split", 3, "--placement", "split")
    assert ["actor", "actor.optimizer", "ref"] == expected.names()
    assert all(same(expected(3, name), found(3, name)) for name in expected.names())


def test_weights_that_sleep_while_the_actor_learns_are_the_same(run, home):
    expected, found = run("three", 3), run("tight", 3, "--devices", "cpu:1@8MB")
    assert all(same(expected(3, name), found(3, name)) for name in expected.names())
    plan = json.loads((home / "tight" / "plan.json").read_text())
    slept = [action["id"] for action in plan["actions"] if action["kind"] == "sleep"]
    assert "sleep:ref@all/weights" in {name.partition("#")[0] for name in slept}


def test_a_resumed_run_goes_on_bit_for_bit(run):
    words = ("--placement", "split")
    expected = run("split", 3, *words)
    run("cut", 1, *words)
    found = run("cut", 3, "--resume", *words)
    assert all(same(expected(3, name), found(3, name)) for name in expected.names())


def test_of_adapters_each_half_is_averaged_by_itself(run):
    found = run("adapted", 2, rank=2, decay=0.5)
    assert all(name.endswith(("lora_A", "lora_B")) for name in found(2, "ref"))
    expected = moved(found(1, "ref"), found(2, "actor"), 0.5)
    assert apart(expected, found(2, "ref")) < 1e-7
    assert apart(found(1, "ref"), found(2, "ref")) > 1e-3


def test_of_weights_in_bfloat16_it_is_a_float32_average(run):
    found = run("narrow", 2, dtype="bfloat16")
    assert {"torch.bfloat16"} == {str(w.dtype) for w in found(2, "actor").values()}
    assert {"torch.float32"} == {str(w.dtype) for w in found(2, "ref").values()}
    expected = moved(found(1, "ref"), found(2, "actor"), 0.9)
    assert apart(expected, found(2, "ref")) < 1e-7


def test_its_weights_are_exported(run, rlflow, home):
    found = run("three", 3)(3, "ref")
    done = rlflow("export", "three", "--model", "ref", "-o", "exported")
    assert 0 == done.code, done.err
    from safetensors.torch import load_file

    written = load_file(home / "exported" / "model.safetensors")
    assert all(same({name: w}, {name: written[name]}) for name, w in found.items())


def test_a_model_of_other_widths_is_refused_with_what_differs(rlflow, home, monkeypatch):
    monkeypatch.chdir(home)
    shutil.copytree(TINY, home / "other")
    config = json.loads((home / "other" / "config.json").read_text())
    (home / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    done = rlflow("run", "averaged.py", "--set", f"other={home / 'other'}", "--iterations", 1)
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
def test_ranks_average_their_shards(run, placement):
    """The blend needs no other rank: of what the ranks have learned it is the plain loop's."""
    words = ("--placement", placement, "--backend", "ray", "--check-sync")
    whole = run(f"{placement} whole", 3, *words)
    run(f"{placement} cut", 1, *words)
    resumed = run(f"{placement} cut", 3, "--resume", *words)
    assert all(same(whole(3, name), resumed(3, name)) for name in whole.names())
    assert apart(moved(whole(2, "ref"), whole(3, "actor"), 0.9), whole(3, "ref")) < 1e-7
    distance = apart(run("three", 3)(3, "ref"), whole(3, "ref"))
    assert distance == 0 if placement == "together" else distance < 1e-4
