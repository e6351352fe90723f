"""verl's side of `vs_numerics.py`; runs in verl's environment and imports no rlflow.

    python numerics/verl_side.py SPEC.json INPUTS.pt RESULTS.pt

Calls verl's own functions on the inputs and writes values and gradients. An exception of a
call is written in place of its results.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.distillation.fsdp import losses as fsdp_losses
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

Fields = Mapping[str, Tensor]
Options = Mapping[str, Any]
Made = dict[str, Tensor]
SEED = 11


def totals(mask: Tensor, options: Options) -> dict[str, Any]:
    """What verl's engines tell a loss of the global batch."""
    return {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": len(mask),
        "loss_scale_factor": options.get("constant"),
    }


def estimator(function: str, fields: Fields, options: Options) -> Made:
    """A registered advantage estimator; results are compared where the mask is."""
    mask = fields["response_mask"].long()
    column = [[0]] * len(mask)
    keys = [f"reward{k}" for k in range(fields["rewards"].shape[1])]
    pool = {
        "token_level_rewards": fields[options.get("rewards", "token_rewards")].clone(),
        "response_mask": mask,
        "index": fields["group"].numpy(),
        "values": fields["values"],
        "reward_baselines": fields["baseline"],
        "old_log_probs": fields["old_log_probs"],
        "sum_pi_squared": fields["sum_pi_squared"],
        "non_tensor_batch": dict(zip(keys, fields["rewards"].T.numpy(), strict=True)),
        "batch": {
            "prompts": torch.tensor(column),
            "attention_mask": torch.cat([torch.ones(len(mask), 1, dtype=torch.int64), mask], 1),
        },
        **options.get("arguments", {}),
        "config": OmegaConf.create({"gdpo_reward_keys": keys, **options.get("config", {})}),
    }
    called = core_algos.get_adv_estimator_fn(function)
    wanted = inspect.signature(called).parameters
    advantages, returns = called(**{k: v for k, v in pool.items() if k in wanted})
    made = {"advantages": torch.where(mask > 0, advantages, 0.0)}
    if options.get("returns"):
        made["returns"] = torch.where(mask > 0, returns, 0.0)
    return made


def config(options: Options, mask: Tensor) -> ActorConfig:
    """An actor's configuration with some options; those of `policy_loss` by themselves."""
    made = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=8,
        **options.get("config", {}),
    )
    for name, value in options.get("policy_loss", {}).items():
        object.__setattr__(made.policy_loss, name, value)
    object.__setattr__(made, "global_batch_info", totals(mask, options))
    return made


def policy_loss(function: str, fields: Fields, options: Options) -> Made:
    """A registered policy loss with the gradient in the log-probs.

    With `correction` the weights and the mask of verl's rollout correction come first. The rows
    may be cut into `micro` batches, whose losses add up.
    """
    torch.manual_seed(SEED)
    mask = fields["response_mask"].long()
    x = fields["log_probs"].clone().requires_grad_()
    given = fields[options["advantages"]]
    advantages = (given if given.dim() == 2 else given[:, None].expand_as(mask)) * mask
    old = fields[options.get("old", "old_log_probs")]
    weights, kept = None, mask
    if "correction" in options:
        proto, kept, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=old,
            rollout_log_prob=fields["rollout_log_probs"],
            response_mask=mask,
            **options["correction"],
        )
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    told = config(options, kept if options.get("count_kept") else mask)
    loss = torch.zeros((), dtype=torch.float64)
    called = core_algos.get_policy_loss_fn(function)
    for part in torch.arange(len(mask)).chunk(options.get("micro", 1)):
        one, _ = called(
            old_log_prob=old[part],
            log_prob=x[part],
            advantages=advantages[part],
            response_mask=kept[part],
            loss_agg_mode=options["aggregate"],
            config=told,
            rollout_is_weights=None if weights is None else weights[part],
        )
        loss = loss + one
    return differentiated(loss, x)


def penalty(function: str, fields: Fields, options: Options) -> Made:
    """`kl_penalty` of every token, with the gradient of its sum under the mask."""
    mask = fields["response_mask"]
    x = fields["log_probs"].clone().requires_grad_()
    kl = core_algos.kl_penalty(x, fields["ref_log_probs"], options["kl"])
    kept = torch.where(mask, kl, 0.0)
    (gradient,) = torch.autograd.grad(kept.sum(), x)
    return {"kl": kept.detach(), "gradient": gradient}


def value_loss(function: str, fields: Fields, options: Options) -> Made:
    """`compute_value_loss`."""
    mask = fields["response_mask"].long()
    x = fields["new_values"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        vpreds=x,
        returns=fields["returns"],
        values=fields["values"],
        response_mask=mask,
        cliprange_value=options["clip"],
        loss_agg_mode=options["aggregate"],
        **totals(mask, options),
    )
    return differentiated(loss, x)


def aggregation(function: str, fields: Fields, options: Options) -> Made:
    """`agg_loss`, with what its engines tell it or by itself."""
    mask = fields["response_mask"].long()
    x = fields["token_advantages"].clone().requires_grad_()
    told = {} if options.get("alone") else totals(mask, options)
    loss = core_algos.agg_loss(x, mask, options["aggregate"], **told)
    return differentiated(loss, x)


def weights(function: str, fields: Fields, options: Options) -> Made:
    """The weights of rollout correction."""
    mask = fields["response_mask"].long()
    log_ratio = fields["old_log_probs"] - fields["rollout_log_probs"]
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, **options)
    return {"weights": found * mask}


def rejection(function: str, fields: Fields, options: Options) -> Made:
    """The mask of rollout rejection."""
    mask = fields["response_mask"].long()
    log_ratio = fields["old_log_probs"] - fields["rollout_log_probs"]
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, **options)
    return {"kept": kept.double()}


def diagnostics(function: str, fields: Fields, options: Options) -> Made:
    """`compute_offpolicy_metrics`: the measures that the call names."""
    mask = fields["response_mask"].long()
    policies = (fields["old_log_probs"], fields["rollout_log_probs"])
    found = rollout_corr_helper.compute_offpolicy_metrics(*policies, mask)
    return {name: torch.tensor(found[name], dtype=torch.float64) for name in options["measures"]}


def controller(function: str, fields: Fields, options: Options) -> Made:
    """The KL coefficient after updates with the given measurements."""
    made = core_algos.AdaptiveKLController(options["init"], options["target"], options["horizon"])
    found = []
    for kl in options["measured"]:
        made.update(kl, options["n"])
        found.append(made.value)
    return {"coefficients": torch.tensor(found, dtype=torch.float64)}


def top_k(function: str, fields: Fields, options: Options) -> Made:
    """`compute_forward_kl_topk` of verl's FSDP engine, held above 0 as its caller does."""
    mask = fields["response_mask"]
    rows, width = mask.shape
    x = fields["student_logits"].clone().requires_grad_()
    offsets = torch.arange(rows + 1) * width
    given = {
        name: torch.nested.nested_tensor_from_jagged(fields[name].flatten(0, 1), offsets)
        for name in ("teacher_log_probs", "teacher_tokens")
    }
    made = fsdp_losses.compute_forward_kl_topk(
        student_logits=x.flatten(0, 1)[None],
        teacher_topk_log_probs=given["teacher_log_probs"],
        teacher_topk_ids=given["teacher_tokens"],
        config=SimpleNamespace(distillation_loss=SimpleNamespace(**options)),
        data_format="thd",
    )
    found = made["distillation_losses"].view(rows, width).clamp_min(0.0)
    kept = torch.where(mask, found, 0.0)
    (gradient,) = torch.autograd.grad(kept.sum(), x)
    return {"kl": kept.detach().double(), "gradient": gradient}


def differentiated(loss: Tensor, x: Tensor) -> Made:
    """A loss and its gradient in x."""
    (gradient,) = torch.autograd.grad(loss, x)
    return {"loss": loss.detach().double(), "gradient": gradient}


KINDS: dict[str, Callable[[str, Fields, Options], Made]] = {
    "estimator": estimator,
    "policy": policy_loss,
    "kl": penalty,
    "value": value_loss,
    "aggregate": aggregation,
    "weights": weights,
    "rejection": rejection,
    "diagnostics": diagnostics,
    "controller": controller,
    "distillation": top_k,
}


def answer(call: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """What one call makes of one batch, or how it fails."""
    try:
        return {"made": KINDS[call["kind"]](call["function"], fields, call["options"])}
    except Exception:
        return {"error": traceback.format_exc(limit=-4)}


def main() -> None:
    """Read the calls and the inputs, write the results of every seed."""
    given, inputs, results = (Path(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    calls = json.loads(given.read_text(encoding="utf-8"))["calls"]
    made = [
        {call["id"]: {b: answer(call, seed[b]) for b in call["batches"]} for call in calls}
        for seed in torch.load(inputs)
    ]
    torch.save(made, results)


if __name__ == "__main__":
    main()
