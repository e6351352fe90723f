"""The page of models: what the table of families says, a line each."""

from __future__ import annotations

from rlflow.modelfiles.families import (
    FAMILIES,
    Family,
    cutting_finding,
    packing_finding,
    sharding_finding,
)
from rlflow.modelfiles.layouts.stages import staging_finding

ATTENTION = {
    "full": "packed", "latent": "latent (MLA)", "hybrid": "states, row by row",
    "own": "code of its own", "encoder": "an encoder's", "none": "not loaded",
}  # fmt: skip
EXPERTS = {"none": "", "apart": "mixture", "fused": "mixture, fused in files"}
START = """# Models

What each architecture of transformers can be in rlflow, by its `model_type` in `config.json`.
`check` and `plan` read this table, and so does loading: what one refuses, the others refuse,
with the code given here. *One* is training, forwards and embedded rollouts on one device, and
export; *fsdp* the same over ranks that share parameters, *tp* over ranks that share layers,
*pp* updates and forwards over stages of layers.
`make test-architectures` makes a tiny model of each architecture of the installed transformers
and holds every line against what happens: packed logits, gradients and greedy tokens against
the model's own forward, and what two ranks compute against one rank.

Tokens go to experts on other ranks (`ep=`) in these mixtures; others are refused (E533):
{dispatched}.

Tokens of rows lie on several ranks (`cp=`) in all that run on *fsdp* and are packed or latent: by
Ulysses, or round a ring where no layer sees windows. Of models with states by Ulysses alone, and in
these; others are refused (E537): {parted}.

An architecture that is not here is judged by what its config says. Engines in processes of
their own (SGLang, vLLM) compute what they can: this table is of the engines that rlflow brings.

| `model_type` | attention | experts | one | fsdp | tp | pp |
|---|---|---|---|---|---|---|
"""
END = """
## Models that see

Given `images=`, a model sees the pictures of its prompts, in training and in rollouts; without, it
is trained on text as any other.

| family | a picture is | by the worker | in SGLang |
|---|---|---|---|
| Qwen2.5-VL | a grid, by time, height and width | whole, by `fsdp tp cp pp` | patches of 14^2 |
| Qwen3-VL | the same, which several layers of text see | whole, by `fsdp tp cp pp` | any `tp=` |
| Qwen3-VL-MoE | the same | whole, by `fsdp ep tp cp pp` | E554 |
| Mistral 3 | rows, with a token at the end of each | whole, by `fsdp tp cp pp` | any `tp=` |
| InternVL | tiles of one size | whole, by `fsdp tp cp pp` | of Qwen2 and Qwen3, any `tp=` |
| Gemma 3 | as many tokens whatever its size, seen both ways | whole, by `fsdp tp cp pp` | E554 |

Log-probs, drawn tokens and gradients of packed rows are those of transformers' own forward, of the
tower too; what SGLang draws is what the embedded engine draws. The tower is trained with the rest,
unless [`freeze=`](pipelines.md#models) names it: `vision` is the tower, `projector` what leads
from there to the language model. Plans count the seconds of a tower and the activations that it
leaves to a backward, none where it is frozen, by the sizes of the pictures that the data has
(`inputs:` says how many a prompt, of how many tokens, and where that is from).
`lora=` has adapters on the language model alone, and nothing else is trained then. Other layouts
and engines are refused with pictures (E554), other families with E551.
"""


def page():
    """The whole page."""
    dispatched = ", ".join(sorted(kind for kind, each in FAMILIES.items() if each.dispatched))
    lines = (line(kind, family) for kind, family in sorted(FAMILIES.items()))
    parted = ", ".join(sorted(kind for kind, each in FAMILIES.items() if each.parted))
    return "".join([START.format(dispatched=dispatched, parted=parted), *lines, END])


def line(kind: str, family: Family) -> str:
    """One row of the table."""
    attention = ATTENTION.get(family.attention, family.layers)
    packing = packing_finding(kind, family)
    found = [packing, packing or sharding_finding(kind, family)]
    found.append(packing or cutting_finding(kind, family, kind))
    staged = sharding_finding(kind, family) or staging_finding(kind, family, 2, 2)
    found.append(packing or staged)
    codes = [each.code if each else "runs" for each in found]
    return f"| {kind} | {attention} | {EXPERTS[family.experts]} | {' | '.join(codes)} |\n"
