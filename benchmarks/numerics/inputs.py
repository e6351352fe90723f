"""The inputs of `vs_numerics.py`: random ragged batches, float64, the same for both sides.

    ragged   rows of unequal length with holes in the mask, groups unequal and interleaved
    edge     also an empty row, a group of one, level groups, a token whose ratio is 1,
             rows of advantage 0, and ratios far enough from 1 for every clip
    far      as ragged, with log-ratios beyond +-20
    full     as ragged, without holes
    very far as ragged, with a row whose log-ratios are all above 10
    small    as ragged, with rewards and values of about 1e-4: every epsilon is felt
    sorted   four groups of four, one after the other; one of them level

Whole batches follow from a seed. This file knows no estimator and no loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

BATCHES = ("ragged", "edge", "far", "full", "very far", "sorted", "small")
TALL = torch.tensor([0.0, 0.25, 0.5, 1.0, -1.0], dtype=torch.float64)
VOCABULARY, TOP = 11, 4
SIZES = {
    "ragged": (4, 3, 5, 2),
    "edge": (4, 3, 1, 3, 2, 1),
    "far": (4, 3, 3),
    "full": (4, 3, 2),
    "very far": (2, 2),
    "sorted": (4,) * 4,
    "small": (4, 3, 5, 2),
}


def batches(seed: int) -> dict[str, dict[str, Tensor]]:
    """Every batch of a seed, by name."""
    return {name: batch(name, seed) for name in BATCHES}


def batch(name: str, seed: int) -> dict[str, Tensor]:
    """All fields that any function reads; `[rows, tokens]`, `[rows]` or `[rows, rewards]`."""
    drawn = torch.Generator().manual_seed(1000 * seed + BATCHES.index(name))
    sizes = SIZES[name]
    rows, tokens = sum(sizes), int(torch.randint(7, 13, (), generator=drawn))
    order = torch.arange(rows) if name == "sorted" else torch.randperm(rows, generator=drawn)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[order] * 7 + 3
    mask = masks(rows, tokens, name, drawn)
    size = 1e-4 if name == "small" else 1.0
    reward = size * rewards(group, name, drawn)
    policies = log_probs(mask, name, drawn)
    pi = policies["old_log_probs"].exp()
    rest = torch.rand(rows, tokens, generator=drawn, dtype=torch.float64)
    row_advantages = normal(drawn, rows)
    token_advantages = normal(drawn, rows, tokens)
    if name == "edge":
        row_advantages[::4] = 0.0
    if name == "far":
        row_advantages[1] = token_advantages[1, 0] = -1.0
    return {
        "response_mask": mask,
        "group": group,
        "reward": reward,
        "rewards": torch.stack([reward, size * rewards(group, name, drawn)], -1),
        "token_rewards": at_the_end(reward, mask),
        "dense_rewards": at_the_end(reward, mask) + 0.1 * size * normal(drawn, rows, tokens),
        "baseline": TALL[torch.randint(len(TALL), (rows,), generator=drawn)],
        "values": size * normal(drawn, rows, tokens),
        "new_values": normal(drawn, rows, tokens),
        "returns": normal(drawn, rows, tokens),
        "sum_pi_squared": pi.square() + rest * (1 - pi).square(),
        "row_advantages": row_advantages,
        "token_advantages": token_advantages,
        "scores": normal(drawn, rows),
        **teacher(rows, tokens, drawn),
        **policies,
    }


def teacher(rows: int, tokens: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """The logits of a student and of its teacher, and what the teacher finds likeliest."""
    logits = 2 * normal(drawn, rows, tokens, VOCABULARY)
    likeliest = logits.log_softmax(-1).topk(TOP)
    return {
        "student_logits": normal(drawn, rows, tokens, VOCABULARY),
        "teacher_logits": logits,
        "teacher_log_probs": likeliest.values,
        "teacher_tokens": likeliest.indices,
    }


def normal(drawn: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(shape, generator=drawn, dtype=torch.float64)


def masks(rows: int, tokens: int, name: str, drawn: torch.Generator) -> Tensor:
    """Rows of 2 to `tokens` tokens, a fifth of them holes; the first one of a row stays."""
    lengths = torch.randint(2, tokens + 1, (rows,), generator=drawn)
    mask = torch.arange(tokens) < lengths[:, None]
    if name != "full":
        mask &= torch.rand(rows, tokens, generator=drawn) > 0.2
        mask[:, 0] = True
    if name == "edge":
        mask[int(torch.randint(rows, (), generator=drawn))] = False
    return mask


def rewards(group: Tensor, name: str, drawn: torch.Generator) -> Tensor:
    """A few levels in some groups, so that there are ties, and any number in the others.

    Only on edge and sorted are all rewards of a group the same.
    """
    levels = TALL[torch.randint(len(TALL), group.shape, generator=drawn)]
    reward = torch.where(group % 2 == 0, levels, normal(drawn, len(group)))
    for one in set(group.tolist()):
        reward[(group == one).nonzero()[0]] += 0.125
    if name in ("edge", "sorted"):
        reward[group == group.min()] = 0.1
    if name == "edge":
        reward[group == group.min() + 7] = 0.0
    return reward


def at_the_end(reward: Tensor, mask: Tensor) -> Tensor:
    """The reward on the last unmasked token, `[rows, tokens]`.

    Of a row without one in the last column: that is where verl's reward managers write it.
    """
    places = torch.arange(1, mask.shape[1] + 1) * mask
    last = places.amax(-1) - 1
    spread = torch.zeros(mask.shape, dtype=torch.float64)
    spread[torch.arange(len(mask)), last] = reward
    return spread


def log_probs(mask: Tensor, name: str, drawn: torch.Generator) -> dict[str, Tensor]:
    """Log-probs of the current, old, sampling and reference policies, none above 0."""
    current = -3 * torch.rand(mask.shape, generator=drawn, dtype=torch.float64) - 1e-3
    width = 0.9 if name == "edge" else 0.4
    moved = {
        which: (current + width * normal(drawn, *mask.shape)).clamp(max=-1e-3)
        for which in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    if name == "edge":
        moved["old_log_probs"][:, 0] = current[:, 0]
    if name == "far":
        current[0, 0], current[1, 0] = -27.0, -0.5
        for far in moved.values():
            far[0, 0], far[1, 0] = -1.5, -26.0
    if name == "very far":
        for far in moved.values():
            far[0] = current[0] - 12.0
    return {"log_probs": current, **moved}
