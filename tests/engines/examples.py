"""Rows, plain models and engines that the tests of training share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch

from rlflow.batch import flat, make_batch, ragged_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine


@dataclass(frozen=True, kw_only=True)
class Spec:
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: str = "float32"
    momentum: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0


def rows(prompt_sizes=(5, 3, 7), n=3, seed=0, response_sizes=(6, 0, 1, 4, 2)):
    """Ragged rows: groups interleaved, an empty response, one of a single token."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(32) for _ in range(size)] for size in prompt_sizes]
    order = [group for _ in range(n) for group in range(len(prompts))]
    responses = [
        [rng.randrange(32) for _ in range(response_sizes[row % len(response_sizes)])]
        for row in range(len(order))
    ]
    fields = {
        "prompt_tokens": ragged_rows([prompts[group] for group in order], torch.int64),
        "response_tokens": ragged_rows(responses, torch.int64),
    }
    return make_batch(fields, len(order))


def plain_log_probs(module, batch, temperature=1.0):
    """The same by transformers alone: one padded batch, the prompt in every row."""
    prompts, responses = batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind()
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, : len(p) + len(r)] = torch.cat([p, r])
        mask[row, : len(p) + len(r)] = 1
    scores = (module(input_ids=tokens, attention_mask=mask).logits / temperature).log_softmax(-1)
    parts = [
        scores[row, len(p) - 1 : len(p) + len(r) - 1].gather(1, r[:, None])[:, 0]
        for row, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    return torch.cat(parts)


def plain_model(path):
    from transformers import AutoModelForCausalLM

    return exact(
        AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
    )


# Families whose norms have weights that are counted from one.
FROM_ONE = ("Gemma", "Qwen3_5", "Qwen3Next")


def exact(module):
    """Norms in float64 too, where transformers rounds to float32 on the way."""

    def forward(layer, x):
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
        weight = layer.weight + any(name in type(layer).__name__ for name in FROM_ONE)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    for layer in module.modules():
        kind = type(layer).__name__
        if "RMSNorm" in kind and "Gated" not in kind and "forward" not in vars(layer):
            layer.forward = partial(forward, layer)
    return module


def weighted(batch):
    """A loss whose weights do not depend on how the batch is cut."""
    table = torch.sin(torch.arange(32, dtype=torch.float64) * 7)

    def loss(outputs, micro):
        weight = table[flat(micro["response_tokens"])]
        total = sum((values * weight).sum() for values in outputs.values())
        largest = weight.max() if len(weight) else torch.tensor(-1.0)
        return total, {"rows": torch.tensor(float(len(micro))), "largest_max": largest}

    return loss


def gradients(engine, batch, outputs=("log_probs",), temperature=1.0):
    """What a step would use, without making it."""
    engine.optimizer.step = lambda scale: None
    engine.step(
        batch, weighted(batch), outputs=outputs, temperature=temperature, max_grad_norm=None
    )
    return {name: p.grad.clone() for name, p in engine.model.module.named_parameters()}


def worst(expected, found):
    return max(
        float((expected[name] - found[name]).abs().max() / (expected[name].abs().max() + 1e-3))
        for name in expected
    )


def engine(path, micro_tokens=None, dtype=torch.float64, head="lm", options=None, **spec):
    model = load_model(path, dtype=dtype, device="cpu", head=head, **(options or {}))
    if dtype == torch.float64:
        exact(model.module)
    return TrainEngine(model, Spec(**spec), micro_tokens=micro_tokens)


def sft(outputs, micro):
    return -outputs["log_probs"].sum() / 50, {}


def one_step(trained, batch, loss=sft, max_grad_norm=1.0):
    return trained.step(
        batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=max_grad_norm
    )


def trained_tensors(model):
    """The weights that training changes, as a checkpoint holds them."""
    return {n: t for n, t in model.named_tensors().items() if n in model.trained_names()}


def resume(trained, state, meta):
    """Write an optimizer's state into its shards, as a checkpoint is read."""
    for name, shard in trained.optimizer.shards().items():
        shard.tensor.copy_(state[name])
    trained.optimizer.steps = meta["steps"]


def copies(trained):
    both = {**trained.model.named_tensors(), **trained.optimizer.tensors()}
    return {name: tensor.clone() for name, tensor in both.items()}


def step_towards_one(trained, output):
    """A step on `rows` by which an output comes nearer to one everywhere."""
    trained.step(
        rows(),
        lambda outputs, micro: ((outputs[output] - 1).square().sum(), {}),
        outputs=(output,),
        temperature=1.0,
        max_grad_norm=1.0,
    )
