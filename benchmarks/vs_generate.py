"""A rollout of rlflow's own engine beside `generate` of Hugging Face, the same tokens in turns.

    python benchmarks/vs_generate.py                     a tiny model on the CPU
    python benchmarks/vs_generate.py --device cuda:0     1.5B on a GPU

Greedy, of full length, several samples of each prompt, with log-probs on both sides. The tokens
of both sides have to be equal in float32, and nearly all of them in bfloat16.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from turns import MODEL_SIZES, Turns, filled, in_turns, model_directory, options_of, report

from rlflow.batch import ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout

# Of a random model in bfloat16 the two likeliest tokens are often equal; the rest of a row differs.
LEAST_EQUAL = 0.2
NOTES = (
    "Medians over the turns, A B B A; the ratio is the median over the pairs, `of pairs` the "
    "lowest and the highest. A turn is a whole rollout: prompts on the host to tokens, log-probs.",
    "bfloat16 on a GPU, float32 on a CPU, the same random weights. Prompts are of two lengths; "
    "Hugging Face gets them padded to the left, once for each sample, as `num_return_sequences` "
    "makes them. Its log-probs are those of `output_logits`, for tokens that were drawn.",
    "SGLang is the engine for GPUs: vs_sglang.py has it, and learning_sglang.py both.",
)


class HuggingFace:
    """`generate` on a model with given weights."""

    def __init__(self, path: str, weights: dict[str, Any], device: str, dtype: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path), dtype=dtype
            )
        self.model.load_state_dict(weights, strict=False)
        self.model.eval()
        self.device = device

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, new_tokens: int) -> Any:
        """Tokens and log-probs `[rows, new_tokens]`, on the CPU."""
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        given = padded.repeat_interleave(n, 0).to(self.device)
        made = self.model.generate(
            given,
            attention_mask=mask.repeat_interleave(n, 0).to(self.device),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = made.sequences[:, width:]
        scores = [
            logits.float().log_softmax(-1).gather(-1, tokens[:, [at]])
            for at, logits in enumerate(made.logits)
        ]
        return tokens.cpu(), torch.cat(scores, 1).cpu()


def main() -> None:
    """Measure, print the table, write it."""
    options = filled(options_of(__doc__).parse_args())
    if not options.gpu:
        torch.set_num_threads(1)
    gpu, device, size = options.gpu, options.device, MODEL_SIZES[options.size]
    dtype = torch.bfloat16 if gpu else torch.float32
    prompt, new_tokens, groups, n = (256, 256, 32, 8) if gpu else (9, 24, 4, 4)
    if options.quick and gpu:
        new_tokens = 32
    path = str(model_directory(size, prompt + new_tokens + 8))
    model = load_model(path, dtype=dtype, device=device, init="random", seed=3)
    weights = {name: shard.tensor for name, shard in model.shards().items()}
    theirs = HuggingFace(path, weights, device, dtype)
    rollout = TorchRollout(model)
    made = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, size.vocabulary, (prompt - group % 2,), generator=made).tolist()
        for group in range(groups)
    ]
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0, n=n)
    key = SampleKey(seed=0, iteration=0, stream="bench")
    given, ids = ragged_rows(prompts, torch.int64), torch.arange(groups * n)
    tokens: dict[str, Any] = {}

    def ours() -> None:
        found = rollout.generate(given, sampling, key, ids)
        tokens["ours"] = torch.stack(list(found.response_tokens.unbind())).cpu()

    def other() -> None:
        tokens["theirs"] = theirs.generate(prompts, n, new_tokens)[0]

    seconds = in_turns(ours, other, pairs=options.pairs, device=device)
    equal = float((tokens["ours"] == tokens["theirs"]).float().mean())
    if equal < (LEAST_EQUAL if gpu else 1.0):
        raise SystemExit(f"only {equal:.1%} of the tokens of both sides are equal")
    rates = [groups * n * new_tokens / statistics.median(taken) for taken in seconds]
    beside = {"tokens/s": " and ".join(f"{rate:,.0f}" for rate in rates), "equal": f"{equal:.0%}"}
    case = f"rollout, {groups} prompts x {n}, {prompt} + {new_tokens} tokens"
    found = [Turns(case=case, ours=seconds[0], theirs=seconds[1], beside=beside)]
    report("vs_generate", "A rollout beside `generate`", found, NOTES, options)


if __name__ == "__main__":
    main()
