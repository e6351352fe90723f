"""Bodies of the advantage estimators: ragged fields in, the pure functions, ragged out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import lengths, ragged_like, unpad
from rlflow.ops.bodies.common import MASK, inputs_of, num_rows, padded_fields
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, Output, Stat
from rlflow.ops.math import advantages as formulas
from rlflow.ops.math.kl import token_kl


def gae(call: Call) -> Output:
    """Generalised advantage estimates and returns per token."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    made = formulas.gae(
        rewards, fields["values"], fields[MASK], **_options(call, "gamma", "lam", "whiten")
    )
    return _token_output(call, made, metrics)


def reinforce_pp(call: Call) -> Output:
    """REINFORCE++: whitened reward-to-go per token."""
    fields = _fields(call)
    rewards, metrics = _token_rewards(call, fields)
    made = formulas.reinforce_pp(rewards, fields[MASK], **_options(call, "gamma", "whiten"))
    return _token_output(call, made, metrics)


def grpo(call: Call) -> Output:
    """Group-relative advantages, one a row."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    options = _options(call, "std_eps", "scale", "single")
    return _row_output(call, formulas.grpo(reward, fields["group"], **options), metrics)


def rloo(call: Call) -> Output:
    """Leave-one-out advantages, one a row."""
    fields = _fields(call)
    reward, metrics = _row_rewards(call, fields)
    return _row_output(
        call, formulas.rloo(reward, fields["group"], **_options(call, "single")), metrics
    )


def _fields(call: Call) -> dict[str, Tensor]:
    inputs = inputs_of(call)
    return padded_fields(inputs, tuple(inputs.keys()))


def _options(call: Call, *names: str) -> dict[str, Any]:
    return {name: call.params[name] for name in names if name in call.params}


def _kl(call: Call, fields: dict[str, Tensor]) -> Tensor | None:
    """KL of the rollout's policy to the reference per token, where it has a coefficient."""
    if not call.params.get("kl_coef"):
        return None
    kind = call.params.get("kl", "k1")
    return token_kl(fields["rollout_log_probs"], fields["ref_log_probs"], fields[MASK], kind=kind)


def _kl_metric(kl: Tensor | None, fields: dict[str, Tensor]) -> dict[str, Stat]:
    if kl is None:
        return {}
    tokens = float(fields[MASK].sum())
    return {"kl": Stat(kind="mean", total=kl.double().sum().item(), count=tokens)}


def _token_rewards(call: Call, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Stat]]:
    kl = _kl(call, fields)
    rewards = formulas.token_rewards(
        fields["reward"], fields[MASK], kl=kl, kl_coef=call.params.get("kl_coef", 0.0)
    )
    return rewards, _kl_metric(kl, fields)


def _row_rewards(call: Call, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Stat]]:
    kl = _kl(call, fields)
    if kl is None:
        return fields["reward"], {}
    return fields["reward"] - call.params["kl_coef"] * kl.sum(1), _kl_metric(kl, fields)


def _token_output(call: Call, made: tuple[Tensor, Tensor], metrics: dict[str, Stat]) -> Output:
    inputs = inputs_of(call)
    like = inputs[MASK]
    named = dict(zip(("advantages", "returns"), made, strict=True))
    fields = {
        name: ragged_like(unpad(value, lengths(like)).float(), like)
        for name, value in named.items()
        if name in call.wanted
    }
    return Output(fields=fields, rows=num_rows(inputs), metrics=metrics)


def _row_output(call: Call, made: Tensor, metrics: dict[str, Stat]) -> Output:
    return Output(
        fields={"advantages": made.to(torch.float32)},
        rows=len(made),
        metrics={**metrics, "zero": mean_of(made == 0)},
    )
