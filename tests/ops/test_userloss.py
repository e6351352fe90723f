"""`@rf.loss`: what its signature says, gradients and metrics of parts, and what is refused."""

from __future__ import annotations

from typing import TypedDict

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError, PlanError, RunError
from rlflow.ops.losses.user import FunctionLoss
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from tests.conftest import TINY


class Terms(TypedDict):
    loss: rf.Token[float]
    ratio: rf.Token[float]
    ratio_max: rf.Token[float]
    length: rf.Row[float]
    positive: rf.Row[bool]


@rf.loss
def clipped(
    log_probs: rf.Token[float],
    rollout_log_probs: rf.Token[float],
    advantages: rf.Token[float],
    response_mask: rf.Token[bool],
    *,
    clip: float = 0.2,
) -> Terms:
    ratio = (log_probs - rollout_log_probs).exp()
    gain = (ratio * advantages).minimum(ratio.clamp(1 - clip, 1 + clip) * advantages)
    length = response_mask.sum(-1).float()
    return {
        "loss": -gain,
        "ratio": ratio,
        "ratio_max": ratio,
        "length": length,
        "positive": advantages[:, 0] > 0,
    }


@rf.loss(corrects=True)
def by_row(
    log_probs: rf.Token[float], advantages: rf.Row[float], bonus: rf.Row[float] | None
) -> rf.Row[float]:
    assert bonus is None
    return -advantages * log_probs.sum(-1)


def traced(loss, *, staleness=0):
    @rf.pipeline(staleness=staleness)
    def mine(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ops.update(actor, samples, adv, loss=loss)

    return mine.trace()


def refused(loss, **options) -> str:
    with pytest.raises(GraphError) as caught:
        traced(loss, **options)
    return str(caught.value)


# --- what is declared -----------------------------------------------------------------------


def test_an_update_reads_what_the_signature_names():
    node = traced(clipped(clip=0.1, aggregate="token-sum")).node("actor.update")
    read = {bound.name for bound in node.inputs}
    assert {"rollout_log_probs", "advantages", "response_mask"} <= read
    assert "log_probs" not in read
    assert "clipped(clip=0.1, aggregate=token-sum)" == dict(node.params)["loss"].describe()
    assert 1.0 == dict(node.params)["temperature"]


def test_options_are_checked_against_their_annotations():
    for options, says in (
        ({"clp": 0.1}, "did you mean 'clip'"),
        ({"clip": True}, "clip=True"),
        ({"clip": "0.1"}, "float"),
        ({"aggregate": "mean"}, "aggregate"),
        ({"constant": 3.0}, "would do nothing"),
    ):
        with pytest.raises(GraphError, match="E162") as caught:
            clipped(**options)
        text = str(caught.value)
        assert says.replace("did you mean ", "") in text
    with pytest.raises(GraphError, match="mean is over rows"):
        by_row(aggregate="token-sum")


def test_what_is_no_loss_is_refused_with_a_line_to_paste():
    def plain(log_probs, advantages):
        return log_probs

    for given, fix in (
        (plain, "@rf.loss\n"),
        (rf.PolicyLoss, "loss=rf.PolicyLoss()"),
        ("gspo", 'loss=rf.PolicyLoss("gspo")'),
        (None, "rf.PolicyLoss"),
    ):
        text = refused(given)
        assert "E160" in text
        assert fix in text.replace("\n               ", "\n")


def test_an_option_without_a_value_is_asked_for():
    @rf.loss
    def needy(
        log_probs: rf.Token[float], advantages: rf.Token[float], *, beta: float
    ) -> rf.Token[float]:
        return log_probs * advantages * beta

    assert "loss=needy(beta=...)" in refused(needy)
    traced(needy(beta=1))


def text_field(log_probs: rf.Token[float], response: rf.Row[str]) -> rf.Token[float]: ...
def untyped(log_probs: rf.Token[float], advantages) -> rf.Token[float]: ...
def no_forward(advantages: rf.Token[float]) -> rf.Token[float]: ...
def no_result(log_probs: rf.Token[float]): ...
def whole(log_probs: rf.Token[float]) -> float: ...
def integers(log_probs: rf.Token[float]) -> rf.Token[int]: ...
def by_rows(log_probs: rf.Row[float]) -> rf.Token[float]: ...
def many(log_probs: rf.Token[float], *others: rf.Token[float]) -> rf.Token[float]: ...
def prompt(log_probs: rf.Token[float], prompt_tokens: rf.Token[int]) -> rf.Token[float]: ...
def taken(log_probs: rf.Token[float], *, aggregate: str) -> rf.Token[float]: ...


@pytest.mark.parametrize(
    "function",
    [
        text_field,
        untyped,
        no_forward,
        no_result,
        whole,
        integers,
        by_rows,
        many,
        prompt,
        taken,
        "nothing",
    ],
)
def test_a_signature_that_says_too_little_is_refused(function):
    with pytest.raises(GraphError, match="E161"):
        rf.loss(function)


def test_a_loss_of_values_wants_a_value_head():
    @rf.loss
    def squares(values: rf.Token[float]) -> rf.Token[float]:
        return values**2

    assert "E120" in refused(squares)


def test_rows_of_older_weights_need_a_declaration():
    devices = cluster.cpu_cluster(2, threads=1, memory=4e9)
    split = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
    )
    with pytest.raises(PlanError, match="E402") as caught:
        compile_plan(traced(clipped, staleness=1), split, devices, near=TINY)
    assert "@rf.loss(corrects=True)" in str(caught.value)
    plan = compile_plan(traced(by_row, staleness=1), split, devices, near=TINY).plan
    assert ("staleness", 1) in plan.graph.node("actor.update").params


# --- what it computes -----------------------------------------------------------------------


def example(rows=7, tokens=5):
    import torch

    torch.manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,))
    mask = torch.arange(tokens) < lengths[:, None]
    fields = {
        "response_mask": mask,
        "rollout_log_probs": torch.randn(rows, tokens).masked_fill(~mask, float("nan")),
        "advantages": torch.randn(rows),
    }
    return torch.randn(rows, tokens), fields


def computed(spec: FunctionLoss, log_probs, fields, cuts):
    """Loss, gradient and metrics, added up over parts of the rows."""
    from rlflow.ops.bodies.steps.userloss import objective
    from rlflow.ops.math.aggregate import count
    from tests.ops.math.distributions import combine

    leaf = log_probs.clone().requires_grad_()
    totals = count(fields["response_mask"])
    parts = []
    for cut in cuts:
        part = {name: value[cut] for name, value in fields.items()}
        loss, metrics = objective(spec, {"log_probs": leaf[cut]}, part, totals)
        loss.backward()
        parts.append({"loss": loss.detach(), **metrics})
    return leaf.grad, {name: float(value) for name, value in combine(parts).items()}


CUTS = ([slice(0, 7)], [slice(0, 1), slice(1, 4), slice(4, 7)])


@pytest.mark.torch
@pytest.mark.parametrize(
    "spec",
    [clipped, clipped(aggregate="seq-mean-token-mean"), clipped(aggregate="token-sum"), by_row],
)
def test_micro_batches_add_up_to_the_whole(spec):
    import torch

    log_probs, fields = example()
    (whole, numbers), (parts, added) = (computed(spec, log_probs, fields, c) for c in CUTS)
    assert torch.isfinite(whole).all()
    assert bool(whole[fields["response_mask"]].any())
    torch.testing.assert_close(parts, whole)
    assert added == pytest.approx(numbers, rel=1e-5)


@pytest.mark.torch
def test_it_is_the_built_in_loss_where_the_formula_is():
    import torch

    from rlflow.ops.math.aggregate import count
    from rlflow.ops.math.losses.objective import policy_objective

    log_probs, fields = example()
    mask = fields["response_mask"]
    grad, numbers = computed(clipped, log_probs, fields, CUTS[1])
    leaf = log_probs.clone().requires_grad_()
    built_in = rf.PolicyLoss("ppo_clip", old="rollout")
    loss, metrics = policy_objective(built_in, {"log_probs": leaf}, fields, count(mask))
    loss.backward()
    torch.testing.assert_close(grad, leaf.grad)
    assert numbers["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert numbers["ratio_max"] == pytest.approx(float(metrics["ratio_max"]), rel=1e-5)
    ratio = (log_probs - fields["rollout_log_probs"]).exp()[mask]
    assert numbers["ratio"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert numbers["length"] == pytest.approx(float(mask.sum(-1).float().mean()))
    assert numbers["positive"] == pytest.approx(float((fields["advantages"] > 0).float().mean()))


@rf.loss
def whitened(log_probs: rf.Token[float], advantages: rf.Token[float]) -> rf.Token[float]:
    return -log_probs * (advantages - advantages.mean())


@rf.loss
def mean(log_probs: rf.Token[float]) -> rf.Token[float]:
    return log_probs.mean()


@rf.loss
def cut_off(log_probs: rf.Token[float]) -> rf.Token[float]:
    return log_probs.detach()


@rf.loss
def raising(log_probs: rf.Token[float]) -> rf.Token[float]:
    raise KeyError("advantage")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (whitened, "E795.*depend on other rows"),
        (mean, r"E794.*made no 'loss' as declared"),
        (cut_off, "E794.*carries no gradient"),
        (raising, "E794.*raised KeyError: 'advantage'"),
    ],
)
def test_what_would_train_wrong_stops(spec, says):
    with pytest.raises(RunError, match=says):
        computed(spec, *example(), CUTS[0])
