"""What ranks do in the tests of tokens that go to the experts of other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers

from rlflow.engines.hf.routing import experts as experts_of
from rlflow.engines.hf.routing.experts import all_to_all, dispatched_experts


def as_the_layer(rank, path, tokens):
    """Rows of all ranks, so many of each, are what the whole layer makes; so are gradients.

    Nobody chooses the third of four experts. Tokens choose two experts of the other rank, which
    they go to once; the first token of all has one on both.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    whole = model.model.layers[1].mlp.experts
    torch.manual_seed(0)
    x = torch.randn(sum(tokens), 32, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(sum(tokens), 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[3, 3], [0, 1]]).repeat_interleave(torch.tensor(tokens), 0)
    chosen[0] = torch.tensor([3, 0])
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    experts = slice(2 * rank, 2 * rank + 2)
    own = {n: getattr(whole, n)[experts].detach() for n in ("gate_up_proj", "down_proj")}
    layer = SimpleNamespace(**{n: t.requires_grad_() for n, t in own.items()}, act_fn=whole.act_fn)
    mine = [t[rows].detach().requires_grad_() for t in (x, weights)]

    sent = []

    def told(message, *way):
        sent.append(message.nbytes)
        return all_to_all(message, *way)

    with patch.object(experts_of, "all_to_all", told):
        found = dispatched_experts(layer, 0, dist.group.WORLD, mine[0], chosen[rows], mine[1])
        expected = whole(x, chosen, weights)
        assert torch.allclose(expected[rows], found, atol=1e-10)
        found.square().sum().backward()
    # The first token of all goes to both ranks, every other one to the other rank alone.
    leave = tokens[rank] + (rank == 0)
    come = tokens[1 - rank] + (rank == 0)
    assert sent == [leave * (34 * 8 + 2 * 4), come * 32 * 8, leave * 32 * 8, come * 34 * 8]
    expected.square().sum().backward()
    for one, other in ((x, mine[0]), (weights, mine[1])):
        assert torch.allclose(one.grad[rows], other.grad, atol=1e-10)
    for name in own:
        wanted = getattr(whole, name).grad
        wanted = torch.zeros_like(getattr(whole, name)) if wanted is None else wanted
        assert torch.allclose(wanted[experts], getattr(layer, name).grad, atol=1e-10)
    return True
