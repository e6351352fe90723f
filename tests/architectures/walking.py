"""What of a tiny model runs: whole in this process, and shared out over two ranks.

Each function gives a word for what runs, the code of a refusal, or the text of a failure.
"""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import torch

from rlflow.batch import lengths, select_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.checking import check_rows
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.loading import load_model, quiet_transformers
from rlflow.engines.hf.microbatches import flat_places
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.weights.skeletons import maker_of
from rlflow.engines.hf.writing import save_model
from rlflow.errors import RunError, UsageError

RUNS = "runs"
NEW_TOKENS = 6
SHAPES = {
    "fsdp": (1, 2, 1),
    "tp": (1, 1, 2),
    "sequence": (1, 1, 2),
    "ep": (1, 2, 1, 2),
    "ulysses": (1, 2, 1, 1, 2),
    "ring": (1, 2, 1, 1, 2),
    "pp": (1, 1, 1),
}
LIMIT = 1e-2
KEY = SampleKey(seed=0, iteration=0, stream="rollout")


def outcome(function, *args, **options):
    """What became of a call: `runs`, a code, or the last line of what it raised."""
    try:
        function(*args, **options)
    except (UsageError, RunError) as error:
        return error.findings[0].code
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__} at {where}: {error}"[:300].replace("\n", " ")
    return RUNS


def whole(path, out):
    """What runs on one rank, by name: load and forward, backward, rollout, export."""
    found = {"forward": outcome(load_model, path, dtype=torch.float32, device="cpu")}
    if found["forward"] != RUNS:
        return found
    model = load_model(path, dtype=torch.float32, device="cpu")
    plain = plainly(path)
    found["backward"] = outcome(same_gradients, model, plain)
    found["rollout"] = outcome(same_tokens, model, plain)
    found["export"] = outcome(same_files, model, plain, out)
    return found


def plainly(path):
    """The model as transformers alone reads it, its attention eager."""
    import transformers

    with quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(path)
        made = maker_of(config, "lm").from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
    return made.eval()


def next_tokens(plain, tokens):
    """Its logits after each of the tokens of one row, `[tokens, vocabulary]`."""
    return plain(input_ids=tokens[None], use_cache=False).logits[0]


def same_gradients(model, plain):
    """A packed backward gives the gradients of rows computed one at a time."""
    prompts, responses = check_rows(model.config.get_text_config().vocab_size)
    layout = pack(prompts, responses, model.device)
    state = PackedAttention(layout)
    with torch.enable_grad():
        logits = model.logits(layout.tokens, layout.positions, state, layout.targets)
        logits[: layout.predictions].log_softmax(-1)[:, 3].sum().backward()
        for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
            rows = next_tokens(plain, torch.cat([prompt, response]))[len(prompt) - 1 : -1]
            rows.log_softmax(-1)[:, 3].sum().backward()
    own = dict(model.module.named_parameters())
    for name, parameter in plain.named_parameters():
        expected, made = parameter.grad, own[name].grad
        assert (expected is None) == (made is None), f"{name} has a gradient in one alone"
        if expected is not None:
            torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3, msg=name)


@torch.no_grad()
def same_tokens(model, plain):
    """Greedy tokens are those of the model's own forward, one row at a time and without a cache."""
    prompts, _ = check_rows(model.config.get_text_config().vocab_size)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
    ids = torch.arange(len(lengths(prompts)))
    made = TorchRollout(model).generate(prompts, sampling, KEY, ids).response_tokens.unbind()
    for prompt, found in zip(prompts.unbind(), made, strict=True):
        row = prompt
        for _ in range(NEW_TOKENS):
            row = torch.cat([row, next_tokens(plain, row)[-1].argmax()[None]])
        assert row[len(prompt) :].tolist() == found.tolist(), "other tokens"


@torch.no_grad()
def same_files(model, plain, out):
    """What is written is read by transformers as the same model."""
    save_model(model, out)
    tokens = torch.arange(7)
    torch.testing.assert_close(next_tokens(plainly(out), tokens), next_tokens(plain, tokens))


def on_ranks(rank, path, layout):
    """On a rank of two: loads, and computes, differentiates and steps as one rank does.

    Nothing is compared before all is computed: a rank that gives up would leave the other waiting.
    """
    warnings.simplefilter("ignore")
    differences = {}
    how = {"sequence": layout == "sequence", "pp": 2 if layout == "pp" else 1}
    how |= {"cp_by": layout} if layout in ("ulysses", "ring") else {}
    found = outcome(lambda: differences.update(differences_on(path, SHAPES[layout], how)))
    worst = max(differences, key=lambda name: differences[name], default=None)
    if worst is not None and not differences[worst] <= LIMIT:
        return f"{worst} differs by {differences[worst]:.2g}"
    return found


def differences_on(path, shape, how):
    """How far log-probs and gradients are from those of one rank, over the largest of each."""
    from tests.engines import sharded_checks as checks
    from tests.engines.examples import rows, weighted

    one, sharded = checks.pair(path, shape, dtype=torch.float32, **how)
    batch = rows(n=4)
    chosen = checks.own_rows(sharded, len(batch), False)
    mine = select_rows(batch, chosen)
    kinds = ("log_probs",)
    expected = one.forward(batch, outputs=kinds, temperature=1.0)["log_probs"]
    made = sharded.forward(mine, outputs=kinds, temperature=1.0)["log_probs"]
    places = flat_places(lengths(batch["response_tokens"]), torch.tensor(chosen))
    found = {"log-probs": apart(expected[places], made)}
    wanted = checks.gradients(one, batch, batch, kinds)
    shards = sharded.model.shards()
    for name, piece in checks.gradients(sharded, mine, batch, kinds).items():
        box = tuple(slice(*bounds) for bounds in shards[name].box)
        scale = float(wanted[name].abs().max())
        found[name] = apart(wanted[name][box], piece, scale)
    result = sharded.step(mine, weighted(batch), outputs=kinds, temperature=1.0, max_grad_norm=2.0)
    found["a step that was not applied"] = 0.0 if result.applied else 1.0
    return found


def apart(expected, found, scale=1.0):
    """The largest difference over a scale."""
    if not found.numel():
        return 0.0
    return float((expected - found).abs().max()) / (scale + 1e-3)
