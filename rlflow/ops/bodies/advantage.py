"""Bodies of the advantage estimators: ragged fields in, the pure functions, ragged out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import lengths, ragged_like, unpad
from rlflow.contract.values import Stat
from rlflow.ops.bodies.common import MASK, inputs_of, num_rows, padded_fields
from rlflow.ops.bodies.finite import finite_inputs
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.bodies.steps import adaptive
from rlflow.ops.body import Call, Output
from rlflow.ops.controllers import AdaptiveKL
from rlflow.ops.math.advantages import group, token
from rlflow.ops.math.groups import GroupStatistics, degenerate
from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.masked import select

Fields = dict[str, Tensor]
Metrics = dict[str, Stat]


def gae(call: Call) -> Output:
    """Generalised advantage estimates and returns per token."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    options = _options(call, "gamma", "lam", "whiten")
    finished = fields["finished"] if call.params.get("bootstrap") else None
    made = token.gae(rewards, fields["values"], fields[MASK], finished=finished, **options)
    return _token_output(call, made, metrics)


def reinforce_pp(call: Call) -> Output:
    """REINFORCE++: whitened reward-to-go per token."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    made = token.reinforce_pp(rewards, fields[MASK], **_options(call, "gamma", "whiten"))
    return _token_output(call, made, metrics)


def remax(call: Call) -> Output:
    """ReMax: reward-to-go minus the reward of the greedy response."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    made = token.remax(rewards, fields["baseline"], fields[MASK])
    return _token_output(call, made, metrics)


def optimal_token_baseline(call: Call) -> Output:
    """Reward-to-go minus a baseline of the group for every time step."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    made = token.optimal_token_baseline(
        rewards,
        fields["old_log_probs"],
        fields["sum_pi_squared"],
        fields[MASK],
        fields["group"],
        **_options(call, "zero_tail", "single"),
    )
    return _token_output(call, made, {**metrics, **_group_metrics(fields, fields["reward"])})


def grpo(call: Call) -> Output:
    """Group-relative advantages, one a row."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "std_eps", "scale", "single", "leave_one_out")
    return _row_output(call, fields, group.grpo(reward, fields["group"], **options), metrics)


def dr_grpo(call: Call) -> Output:
    """Rewards minus the mean of their group."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    made = group.dr_grpo(reward, fields["group"], **_options(call, "single"))
    return _row_output(call, fields, made, metrics)


def rloo(call: Call) -> Output:
    """Leave-one-out advantages, one a row."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "single", "whiten", "std_eps")
    return _row_output(call, fields, group.rloo(reward, fields["group"], **options), metrics)


def opo(call: Call) -> Output:
    """Rewards minus the mean of their group weighted by length."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    made = group.opo(reward, fields["group"], fields[MASK], **_options(call, "single"))
    return _row_output(call, fields, made, metrics)


def gpg(call: Call) -> Output:
    """Rewards minus the mean of their group, made up for groups that teach nothing."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "alpha", "scale", "std_eps", "single")
    return _row_output(call, fields, group.gpg(reward, fields["group"], **options), metrics)


def pass_at_k(call: Call) -> Output:
    """The lead of the best row of a group over the second."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "std_eps", "scale")
    made = group.pass_at_k(reward, fields["group"], **options)
    return _row_output(call, fields, made, metrics)


def reinforce_pp_baseline(call: Call) -> Output:
    """Rewards minus the mean of their group, whitened."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "single", "whiten", "over")
    made = group.reinforce_pp_baseline(reward, fields["group"], fields[MASK], **options)
    return _row_output(call, fields, made, metrics)


def gdpo(call: Call) -> Output:
    """Several rewards, each relative to its group, added up and whitened."""
    fields = _fields(call)
    weights = call.params["rewards"]
    rewards = torch.stack([fields[name] for name in weights], -1)
    made = group.gdpo(
        rewards,
        fields["group"],
        fields.get(MASK),
        weights=list(weights.values()),
        **_options(call, "std_eps", "scale", "single", "whiten", "over"),
    )
    return _row_output(call, fields, made, {}, rewards)


def _fields(call: Call) -> Fields:
    """The inputs, padded; rewards held in their range, before all that is made of them."""
    inputs = finite_inputs(call)
    fields = padded_fields(inputs, tuple(inputs.keys()))
    held = call.params.get("reward_clip_range")
    if held is not None:
        fields |= {n: fields[n].clamp(*held) for n in ("reward", "baseline") if n in fields}
    return fields


def _options(call: Call, *names: str) -> dict[str, Any]:
    return {name: call.params[name] for name in names if name in call.params}


def _kl(call: Call, fields: Fields) -> Tensor | None:
    """KL of the rollout's policy to the reference per token, where it has a coefficient."""
    if not call.params.get("kl_coef"):
        return None
    kind = call.params.get("kl", "k1")
    if kind == "given":
        return select(fields["kl"], fields[MASK])
    return token_kl(fields["rollout_log_probs"], fields["ref_log_probs"], fields[MASK], kind=kind)


def _kl_metric(kl: Tensor | None, fields: Fields) -> Metrics:
    if kl is None:
        return {}
    tokens = float(fields[MASK].sum())
    return {"kl": Stat(kind="mean", total=kl.double().sum().item(), count=tokens)}


def _kl_coef(call: Call, fields: Fields, metrics: Metrics) -> float:
    """The coefficient of this batch; an adaptive one is logged, and follows the batch's KL."""
    option = call.params.get("kl_coef", 0.0)
    acting = adaptive.kl_coef(option, call.state)
    if isinstance(option, AdaptiveKL):
        kl, rows = metrics["kl"], float(len(fields["reward"]))
        metrics["kl_coef"] = Stat(kind="max", total=acting)
        adaptive.follow_kl(option, call.state, kl.value, tokens=kl.count, rows=rows)
    return acting


def _token_rewards(call: Call, fields: Fields) -> tuple[Tensor, Metrics]:
    kl = _kl(call, fields)
    metrics = _kl_metric(kl, fields)
    rewards = token.token_rewards(
        fields["reward"], fields[MASK], kl=kl, kl_coef=_kl_coef(call, fields, metrics)
    )
    return rewards, metrics


def _row_rewards(call: Call, fields: Fields) -> tuple[Tensor, Metrics]:
    kl = _kl(call, fields)
    if kl is None:
        return fields["reward"], {}
    metrics = _kl_metric(kl, fields)
    return fields["reward"] - _kl_coef(call, fields, metrics) * kl.sum(1), metrics


def _group_metrics(fields: Fields, reward: Tensor) -> Metrics:
    """The shares of groups of one and of groups whose rewards, before a KL, are all equal."""
    sizes = GroupStatistics(fields["group"], fields["group"])
    return {
        "single": mean_of(sizes.each(sizes.size == 1)),
        "degenerate": mean_of(sizes.each(degenerate(reward, fields["group"]))),
    }


def _token_output(call: Call, made: tuple[Tensor, Tensor], metrics: Metrics) -> Output:
    inputs = inputs_of(call)
    like = inputs[MASK]
    named = dict(zip(("advantages", "returns"), made, strict=True))
    fields = {
        name: ragged_like(unpad(value, lengths(like)).float(), like)
        for name, value in named.items()
        if name in call.wanted
    }
    return Output(fields=fields, rows=num_rows(inputs), metrics=metrics)


def _row_output(
    call: Call, fields: Fields, made: Tensor, metrics: Metrics, rewards: Tensor | None = None
) -> Output:
    groups = _group_metrics(fields, fields["reward"] if rewards is None else rewards)
    return Output(
        fields={"advantages": made.to(torch.float32)},
        rows=len(made),
        metrics={**metrics, "zero": mean_of(made == 0), **groups},
    )
