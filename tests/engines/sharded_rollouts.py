"""What ranks do in the tests of generation."""

from __future__ import annotations

import torch

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import EVERYTHING, TorchRollout
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.rollout import ShardedRollout
from rlflow.graph.rules.completion_order import ended_rows
from tests.engines.examples import one_step, rows
from tests.engines.sharded_checks import meshes
from tests.engines.sharded_states import part_of, trained

KEY = SampleKey(seed=3, iteration=1, stream="samples")
STOP = (5, 9)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95, n=3, stop_tokens=STOP)
RAGGED = Sampling(max_new_tokens=12, temperature=1.0, n=3, stop_tokens=tuple(range(8)))
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, n=2, stop_tokens=STOP)


def prompts():
    return ragged_rows([[1, 2, 3], [4, 4], [7, 8, 9, 10, 11], [3]], torch.int64)


def generated(rollout, sampling, offset=0, reach=EVERYTHING):
    asked = prompts()
    ids = torch.arange(len(asked) * sampling.n) + offset
    return rollout.generate(asked, sampling, KEY, ids, reach)


def alike(expected, found, limit=1e-5):
    assert torch.equal(lengths(expected.response_tokens), lengths(found.response_tokens))
    assert torch.equal(flat(expected.response_tokens), flat(found.response_tokens))
    assert torch.equal(expected.finished, found.finished)
    assert (flat(expected.log_probs) - flat(found.log_probs)).abs().max() < limit


def same_tokens(rank, path, shape, is_trained, paged=None):
    """Greedy and sampled responses are those of one rank; ranks of a part agree bit for bit."""
    options = {"dtype": torch.float32, "device": "cpu"}
    model = load_sharded(path, **meshes(shape), trained=is_trained, **options)
    # On blocks: slots for two prompts of two samples, or for one of three; the others wait.
    sharded = ShardedRollout(model, paged=paged, rows_at_once=4)
    one = TorchRollout(load_model(path, **options), paged=paged, rows_at_once=4)
    part = model.ranks.place("fsdp") * 100
    for sampling in (GREEDY, SAMPLED):
        found = generated(sharded, sampling, part)
        alike(generated(one, sampling, part), found)
        said = (flat(found.response_tokens).tolist(), flat(found.log_probs).tolist())
        everyone = model.ranks.gather(said, ("tp",))
        assert all(said == other for other in everyone)
    assert sharded.stats() == one.stats()
    return True


def same_pieces(rank, path, shape, is_trained, count, paged=None):
    """The pieces of a generation are the whole, bit for bit, in the order in which rows end."""
    options = {"dtype": torch.float32, "device": "cpu"}
    model = load_sharded(path, **meshes(shape), trained=is_trained, **options)
    sharded = ShardedRollout(model, paged=paged)
    part = sharded.model.ranks.place("fsdp") * 100
    whole = generated(sharded, RAGGED, part)
    sizes = lengths(whole.response_tokens).tolist()
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    for piece in range(count):
        made = generated(sharded, RAGGED, part, Reach(piece=piece, pieces=count))
        first, last = (ended_rows(len(order), place, count) for place in (piece, piece + 1))
        assert sorted(order[first:last]) == made.rows.tolist()
        for number, tokens, log_probs in zip(
            made.rows.tolist(), made.response_tokens.unbind(), made.log_probs.unbind(), strict=True
        ):
            assert torch.equal(whole.response_tokens.unbind()[number], tokens)
            assert torch.equal(whole.log_probs.unbind()[number], log_probs)
        said = (made.rows.tolist(), flat(made.log_probs).tolist())
        assert all(said == other for other in sharded.model.ranks.gather(said, ("tp",)))
    return len(set(sizes))


def same_logits(rank, path, shape):
    """All ranks of a part have the same logits, bit for bit."""
    model = load_sharded(path, **meshes(shape), trained=False, dtype=torch.float32, device="cpu")
    batch = rows()
    layout = pack(batch["prompt_tokens"], batch["response_tokens"], model.device)
    state = PackedAttention(layout)
    with torch.no_grad():
        logits = model.logits(layout.tokens, layout.positions, state, layout.targets)
    everyone = model.ranks.gather(logits.numpy().tobytes(), ("tp",))
    assert len(everyone) == model.ranks.sizes["tp"]
    return len(set(everyone)) == 1


def training_goes_on_after(rank, path, shape):
    """Generating with the model that is trained leaves training as it was."""
    first, second = trained(path, shape), trained(path, shape)
    batch = part_of(first, rows())
    one_step(first, batch)
    one_step(second, batch)
    generated(ShardedRollout(first.model), SAMPLED)
    held = {id(p): p.numel() for p in first.model.module.parameters()}
    assert held.keys() == {id(p) for p in first.model.parameters.values()}
    for _ in range(2):
        assert one_step(first, batch) == one_step(second, batch)
    return True


def first_rank_decides(rank, path, shape, paged, new_tokens):
    """The ranks draw what the first drew, and stop when it was told to, whatever others think."""
    model = load_sharded(path, **meshes(shape), trained=False, dtype=torch.float32, device="cpu")
    rollout = ShardedRollout(model, paged=paged)
    asked = []

    def told():
        asked.append(rank)
        return rank == 1 or len(asked) == (2 if paged else 4)

    rollout.told_to_stop = told
    sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, n=2)
    found = generated(rollout, sampling, offset=50 * rank)
    everyone = model.ranks.gather(flat(found.response_tokens).tolist(), ("tp",))
    assert all(tokens == everyone[0] for tokens in everyone)
    return lengths(found.response_tokens).tolist()


def gathered_weights_are_read(rank, path, shape):
    """Numbers that a forward reads: this rank's pieces, and all while they are gathered."""
    model = load_sharded(path, **meshes(shape), trained=True, dtype=torch.float32, device="cpu")

    def read():
        return sum(part.numel() for part in model.computed_with())

    pieces = read()
    with model.gathered():
        whole = read()
    return pieces, whole, sum(parameter.numel() for parameter in model.parameters.values())
