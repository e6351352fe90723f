"""What ranks do in the tests of what sharded models hold: loading, sleeping, saving, refusing."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.batch import flat, ragged_rows, select_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf import host_states
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.microbatches import WantedOutputs
from rlflow.engines.hf.recompute import decoder_layers
from rlflow.engines.hf.sharded import forwards as sharded_forwards
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.loading import gather_ahead
from rlflow.engines.hf.sharded.mesh import AXES
from rlflow.engines.hf.sharded.rollout import ShardedRollout
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.stages.train import StagedTrainEngine
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.weights.filling import fill_from_safetensors
from rlflow.errors import RlflowError, RunError
from rlflow.runtime.record.checkpoint import stored_files
from rlflow.runtime.record.manifest import Manifest
from rlflow.runtime.record.shards.places import assign_writers
from rlflow.runtime.worker.loaded import Loaded
from rlflow.runtime.worker.saving import Saver, restore_components, shards_of
from tests.engines.examples import Spec, one_step, rows
from tests.engines.sharded_checks import Messages, differ, gradients, meshes, own_rows, pair


def trained(path, shape, dtype=torch.float32, spec=None, **options):
    model = load_sharded(path, **meshes(shape), trained=True, dtype=dtype, device="cpu", **options)
    return ShardedTrainEngine(model, spec or Spec(), micro_tokens=20)


def part_of(engine, batch):
    return select_rows(batch, own_rows(engine, len(batch), uneven=False))


def contents(engine):
    shards = {**engine.model.shards(), **engine.optimizer.shards()}
    return {name: shard.tensor.clone() for name, shard in shards.items()}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def shards_tile(rank, path, shape):
    """Pieces of all ranks, put together, are the whole model; replicas hold the same ones."""
    engine = trained(path, shape)
    ranks = engine.model.ranks
    one = load_model(path, dtype=torch.float32, device="cpu").named_tensors()
    mine = {name: (shard.box, shard.tensor) for name, shard in engine.model.shards().items()}
    parts = ranks.gather(mine, ("replicate", "fsdp", "tp"))
    assert engine.model.num_bytes() == sum(4 * tensor.numel() for _, tensor in mine.values())
    for name, whole in one.items():
        counted, joined = torch.zeros(whole.shape), torch.zeros(whole.shape)
        for box, tensor in (part[name] for part in parts):
            counted[tuple(slice(*bounds) for bounds in box)] += 1
            joined[tuple(slice(*bounds) for bounds in box)] = tensor
        held_by = ranks.sizes["replicate"]
        copies = held_by if name in engine.model.cuts else held_by * ranks.sizes["tp"]
        assert (counted == copies).all(), name
        assert torch.equal(joined, whole), name
    return len(mine)


def sleeping_changes_nothing(rank, path, shape):
    """Weights and moments come back bit for bit, and so do the steps after."""
    first, second = trained(path, shape), trained(path, shape)
    batch = part_of(first, rows())
    for engine in (first, second):
        assert one_step(engine, batch).applied
    before = contents(first)
    buffers = [*first.model.buffers(), *first.optimizer.state_buffers()]

    first.sleep_optimizer()
    first.model.sleep("offload")

    assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)
    for wrong in (lambda: one_step(first, batch), first.model.shards):
        refused(wrong, "E506")
    first.model.wake()
    refused(lambda: one_step(first, batch), "E506")
    first.wake_optimizer()
    assert same(before, contents(first))
    assert one_step(first, batch) == one_step(second, batch)
    assert same(contents(first), contents(second))
    return True


def discarded_weights_come_by_shards(rank, path, shape):
    """After `discard` the shards can be written, and only then computed with."""
    engine = trained(path, shape)
    batch = part_of(engine, rows())
    expected = engine.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    before = {name: shard.tensor.clone() for name, shard in engine.model.shards().items()}
    engine.model.sleep("discard")
    engine.model.wake()
    refused(lambda: engine.forward(batch, outputs=("log_probs",), temperature=1.0), "E506")

    for name, shard in engine.model.shards().items():
        shard.tensor.copy_(before[name])
    engine.model.loaded(5)

    found = engine.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    assert torch.equal(expected, found)
    assert engine.model.version == 5
    return True


def writes_reach_the_next_pass(rank, path, shape):
    """A write to the shards between two passes is seen everywhere, whole copies or not."""
    engine = trained(path, shape)
    one = TrainEngine(load_model(path, dtype=torch.float32, device="cpu"), None, micro_tokens=20)
    batch = part_of(engine, rows())
    engine.forward(batch, outputs=("log_probs",), temperature=1.0)

    with torch.no_grad():
        for shard in engine.model.shards().values():
            shard.tensor.mul_(0.8)
        for tensor in one.model.named_tensors().values():
            tensor.mul_(0.8)

    expected, found = (
        each.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
        for each in (one, engine)
    )
    assert torch.allclose(expected, found, atol=1e-5)
    return True


def a_number_that_is_not_finite(rank, path, shape, bad):
    """One rank's bad number changes nothing on any rank; the next step is made."""
    engine = trained(path, shape)
    batch = part_of(engine, rows())
    one_step(engine, batch)
    before, version = contents(engine), engine.model.version

    def loss(outputs, micro):
        total = -outputs["log_probs"].sum()
        if rank:
            return total, {}
        if bad == "loss":
            return total * 0 + float("inf"), {}
        return (total - total.detach()).abs().sqrt(), {}

    result = one_step(engine, batch, loss)

    assert not result.applied
    assert same(before, contents(engine))
    assert (version, 1) == (engine.model.version, engine.optimizer.steps)
    assert one_step(engine, batch).applied
    return True


def losses_without_gradient(rank, path, shape):
    """Rows without tokens, and a loss that depends on nothing, keep step with the others."""
    one, sharded = pair(path, shape, micro_tokens=20)
    batch = rows(response_sizes=(0, 4, 0, 3))
    chosen = [row for row in range(len(batch)) if row % 2 == rank]
    seen = []

    def loss(outputs, micro):
        seen.append(len(micro))
        if rank and len(flat(micro["response_tokens"])) > 8:
            return torch.zeros(()), {}
        return -outputs["log_probs"].sum(), {}

    part = select_rows(batch, chosen)
    result = one_step(sharded, part, loss)

    assert result.applied
    assert sum(seen) == len(chosen)
    assert all(seen)
    nobody = one_step(sharded, select_rows(batch, []), loss)
    assert (0.0, True, {}) == (nobody.grad_norm, nobody.applied, nobody.metrics)
    return True


class Held(TorchDispatchMode):
    """The most bytes that tensors on the CPU have held at once."""

    def __init__(self):
        super().__init__()
        self.known = {}
        self.bound = 0
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, output)):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                _, before = self.known.get(storage._cdata, (None, 0))
                if before != storage.nbytes():
                    self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.bound += storage.nbytes() - before
        # What was freed since is still in the bound; it is looked for where that would matter.
        if self.bound > self.most:
            live = {at: (ref, size_of(ref)) for at, (ref, _) in self.known.items()}
            self.known = {at: found for at, found in live.items() if not found[0].expired()}
            self.bound = sum(size for _, size in self.known.values())
            self.most = max(self.most, self.bound)
        return output


def size_of(ref):
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()


def most_held_while_loading(rank, path, shape, init):
    """The most bytes at once, of `load_sharded` and of `load_model`, and those of all weights."""
    options = {"dtype": torch.float32, "device": "cpu", "init": init}
    with Held() as sharded:
        model = load_sharded(path, **meshes(shape), trained=True, **options)
    with Held() as whole:
        one = load_model(path, **options)
    wrong = differ(one.named_tensors(), model.named_tensors(), model.shards(), 0.0)
    assert not wrong, wrong
    return sharded.most, whole.most, one.num_bytes()


def another_layout_continues(rank, path, shape, folder, dtype):
    """What one rank saved after two steps, several continue; and theirs has the same names."""
    dtype = getattr(torch, dtype)
    one, sharded = pair(path, shape, dtype=dtype, spec=Spec(eps=1e-3))
    batch = rows()
    for _ in range(2):
        one_step(one, batch)
    file = Path(folder) / f"{rank}.safetensors"
    state = {**one.model.named_tensors(), **one.optimizer.tensors()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)

    for shards in (sharded.model.shards(), sharded.optimizer.shards()):
        fill_from_safetensors(shards, dict.fromkeys(shards, file))
    sharded.model.loaded(2)
    sharded.optimizer.steps = 2

    assert set(one.optimizer.shards()) == set(sharded.optimizer.shards())
    assert one.optimizer.trained_names() == sharded.optimizer.trained_names()
    ours = sharded.optimizer.shards()
    wrong = differ(one.optimizer.tensors(), {n: s.tensor for n, s in ours.items()}, ours, 0.0)
    assert not wrong, wrong
    expected = one_step(one, batch)
    found = one_step(sharded, part_of(sharded, batch))
    limit = 1e-5 if dtype == torch.float32 else 0.05
    assert abs(expected.metrics["loss"] - found.metrics["loss"]) < limit
    assert abs(expected.grad_norm - found.grad_norm) < limit * 10
    return True


def adapters_merge_as_those_of_one_rank(rank, path, shape, lora):
    """Merged pieces are those of one rank's merged weights, with adapters that say something."""
    one, sharded = pair(path, shape, lora=lora)
    for engine in (one, sharded):
        assert engine.model.trained_names() == one.model.trained_names()
    batch = rows()
    for _ in range(2):
        one_step(one, batch)
        one_step(sharded, part_of(sharded, batch))
    shards = sharded.model.pieces(sharded.model.merged_tensors())
    wrong = differ(
        one.model.merged_tensors(), {n: s.tensor for n, s in shards.items()}, shards, 1e-9
    )
    assert not wrong, wrong
    return True


def refused(action, code):
    with pytest.raises(RunError, match=code):
        action()


def refusal(rank, path, shape, options):
    """What a load that cannot be made says."""
    try:
        load_sharded(path, **meshes(shape), device="cpu", dtype=torch.float32, **options)
    except RlflowError as error:
        return str(error)
    return ""


def wrong_forward_on_the_first_rank(rank, path, shape):
    """Load with a feed-forward that is wrong on one rank; afterwards all is right."""
    real = sharded_forwards._cut_feed_forward
    sharded_forwards._cut_feed_forward = lambda *args: real(*args) * (1.5 if rank == 0 else 1.0)
    try:
        one, sharded = pair(path, shape, dtype=torch.float32, micro_tokens=20)
    finally:
        sharded_forwards._cut_feed_forward = real
    layer = sharded.model.module.model.layers[0]
    assert "forward" not in vars(layer.mlp)
    batch = rows()
    shards = sharded.model.shards()
    wrong = differ(
        gradients(one, batch, batch, ("log_probs",)),
        gradients(sharded, part_of(sharded, batch), batch, ("log_probs",)),
        shards,
        1e-4,
    )
    assert not wrong, wrong
    return True


def bytes_held(rank, path, shape, dtype, spec=None, freeze=()):
    """Bytes of a rank's weights, and of its gradients and moments, as its objects count them.

    The gradients are those that a backward pass has left.
    """
    engine = trained(path, shape, dtype, spec, freeze=freeze)
    optimizer = engine.optimizer
    micro = part_of(engine, rows())

    def loss(outputs, _):
        return -outputs["log_probs"].sum(), {}

    engine.forwarded(micro, loss, WantedOutputs(("log_probs",))).backward()
    left = sum(g.numel() * g.element_size() for g in optimizer.gradients().values())
    moments = sum(b.numel() * b.element_size() for b in optimizer.state_buffers())
    assert left + moments == optimizer.num_bytes()
    return engine.model.num_bytes(), optimizer.num_bytes()


def visiting_state_steps_alike(rank, path, shape, numbers, spec):
    """Steps with moments on the host are those with moments beside the weights, to the bit."""
    resident, visiting = trained(path, shape, spec=spec), trained(path, shape, spec=spec)
    visiting.optimizer = type(resident.optimizer)(visiting.model, spec, visiting=True)
    batch = part_of(resident, rows())
    before = host_states.PIECE_NUMBERS
    host_states.PIECE_NUMBERS = numbers
    try:
        for _ in range(3):
            assert one_step(resident, batch) == one_step(visiting, batch)
            for each in (resident, visiting):
                awake = {n: s.tensor.clone() for n, s in each.optimizer.saved_moments().items()}
                each.sleep_optimizer()
                found = {n: s.tensor for n, s in each.optimizer.saved_moments().items()}
                assert same(awake, found)
                each.wake_optimizer()
    finally:
        host_states.PIECE_NUMBERS = before
    assert not visiting.optimizer.state_buffers()
    return same(contents(resident), contents(visiting))


def held_by(engine, name="actor"):
    """An engine as a worker holds it, and the worker as far as a save asks it."""
    instance = SimpleNamespace(model=name, name=f"{name}@all", trained=True, pp=1)
    loaded = Loaded(
        instance=instance,
        model=engine.model,
        train=engine,
        rollout=None,
        tokenizer=None,
        stop_tokens=(),
    )
    memory, recorder = SimpleNamespace(memory={}), SimpleNamespace(flush=lambda: None)
    worker = SimpleNamespace(trained=lambda: [loaded], store=memory, recorder=recorder, world=None)
    return loaded, Saver(worker)


def saved_by_all(engine, rank, folder, gather):
    """What all ranks of an engine have written of it, by component, nothing woken for it."""
    folder.mkdir(exist_ok=True)
    loaded, saver = held_by(engine)
    loaded.sleep("optimizer", "offload")
    loaded.sleep("weights", "offload")
    held = dict(enumerate(gather(saver.held())))
    orders = assign_writers(held)
    size = saver.take(orders[rank])
    assert not saver._buffers._memory, "what sleeps is not copied"
    assert engine.optimizer.asleep
    assert "offloaded" == engine.model.state
    records = saver.write(folder)
    assert size == sum(record.size for record in records.values())
    gather(None)
    shards = shards_of(orders, held)
    manifest = Manifest(
        iteration=1,
        parent=None,
        files={o.file: None for each in orders.values() for o in each.values()},
        state={},
        identity={},
        shards=shards,
    )
    loaded.wake("weights")
    loaded.wake("optimizer")
    return stored_files(folder, manifest)


def a_checkpoint_goes_round(rank, path, folder, dtype, begins=(1, 2, 1), ends=(1, 1, 2), **spec):
    """Two ranks' shards, read whole, written whole, read by two others: the same bits."""
    options = {"dtype": getattr(torch, dtype), "spec": Spec(eps=1e-3, **spec)}
    one, fsdp = pair(path, begins, **options)
    _, tp = pair(path, ends, **options)
    batch = rows()
    for _ in range(2):
        one_step(fsdp, part_of(fsdp, batch))
    ranks = fsdp.model.ranks
    own = Path(folder)

    first = saved_by_all(fsdp, rank, own / "fsdp2", lambda mine: ranks.gather(mine, AXES))
    assert all(len(files) == 2 for files in first.values())
    numel = sum(math.prod(shard.shape) for shard in fsdp.model.shards().values())
    written = sum(file.path.stat().st_size for files in first.values() for file in files)
    kept = sum(s.tensor.nbytes for s in fsdp.optimizer.saved_moments().values())
    size = 4 * numel + sum(ranks.gather(kept, AXES))
    assert (size == 12 * numel) is not spec
    assert size <= written < size + 40_000, "weights and their moments, float32, once"

    meta = {"steps": 2}
    loaded, _ = held_by(one)
    restore_components(loaded, first, meta, 2)
    whole = {**one.model.named_tensors(), **one.optimizer.tensors()}
    second = saved_by_all(one, 0, own / f"whole{rank}", lambda mine: [mine])
    restore_components(held_by(tp)[0], second, meta, 2)

    for engine in (fsdp, tp):
        shards = {**engine.model.shards(), **engine.optimizer.shards()}
        expected = {name: whole[name] for name in shards}
        for name in engine.model.shards():
            expected[name] = whole.get(f"master.{name}", whole[name])
        wrong = differ(expected, {n: s.tensor for n, s in shards.items()}, shards, 0.0)
        assert not wrong, wrong
    assert 2 == tp.optimizer.steps == tp.model.version
    return True


def layers_kept_whole_step_alike(rank, path, shape):
    """Layers that stay whole until the backward give the bits of those that are gathered again.

    Also of passes after those that keep them for more than a pass. A forward without backward keeps
    none: of its first layer there is a shard again when the last one has computed.
    """
    again, kept = trained(path, shape), trained(path, shape, kept_whole=True)
    whole = []
    first, *_, last = decoder_layers(kept.model.module).values()
    last.register_forward_hook(
        lambda *_: whole.append(not any(isinstance(p, DTensor) for p in first.parameters()))
    )
    batch = part_of(again, rows())
    outputs = {"outputs": ("log_probs",), "temperature": 1.0}
    for _ in range(2):
        assert one_step(again, batch) == one_step(kept, batch)
        assert set(whole) == {True}
        whole.clear()
        one, other = (each.forward(batch, **outputs)["log_probs"] for each in (again, kept))
        assert torch.equal(one, other)
        assert set(whole) == {False}
        whole.clear()
        with kept.model.gathered():
            pass
        for part in kept.model._parts():
            assert all(isinstance(p, DTensor) for p in part.parameters())
    return same(contents(again), contents(kept))


def the_sequence_is_shared(rank, path, shape):
    """Layers see half of the tokens, rounded up, and blocks all; rollouts have all everywhere.

    Instead of an all-reduce a block there is a reduce-scatter, and an all-gather before it.
    """
    plain, shared = trained(path, shape), trained(path, shape, sequence=True)
    batch = part_of(plain, rows())
    plain.micro_tokens = shared.micro_tokens = None
    total = len(shared.packing.rows(batch).layout.tokens)
    sent = []
    for engine in (plain, shared):
        seen = tokens_seen(engine.model.module)
        with Messages() as messages:
            engine.forward(batch, outputs=("log_probs",), temperature=1.0)
        sent.append(messages.count)
    assert set(seen["layers"]) == {-(-total // 2)}
    assert set(seen["blocks"]) == {total}
    blocks = len(seen["blocks"])
    assert blocks == 2 * len(seen["layers"]) == 4
    # The embedding is summed too, where it is cut, and the last hidden states are gathered.
    sums = blocks + ("model.embed_tokens.weight" in shared.model.cuts)
    assert sent[0]["allreduce_"] == sent[1]["allreduce_"] + sums
    assert sent[1]["_reduce_scatter_base_"] == sums
    assert sent[1]["_allgather_base_"] == blocks + 1

    for each in seen.values():
        each.clear()
    prompts = ragged_rows([[3, 4, 5]], torch.int64)
    sampling = Sampling(max_new_tokens=2, temperature=0.0)
    key = SampleKey(seed=0, iteration=0, stream="rollout")
    ShardedRollout(shared.model).generate(prompts, sampling, key, torch.arange(1))
    assert seen["layers"] == seen["blocks"][::2]
    assert seen["layers"][-1] == 1

    layers = len(decoder_layers(shared.model.module))
    norms = [name for name in shared.model.parameters if "norm" in name.split(".")[-2]]
    assert shared.model.seen_in_part == set(norms)
    assert len(shared.model.seen_in_part) % layers == 1
    shared.optimizer.zero_grad()
    one_step(shared, batch)
    with Messages() as messages:
        shared.optimizer.add_parts()
    assert not messages.count, "gradients are gone after their step"
    return True


def tokens_seen(module):
    """How many tokens layers, and their blocks, are called with from now on, in lists by kind."""
    seen = {"layers": [], "blocks": []}

    def watch(kind, layer):
        def note(_, args, kwargs):
            seen[kind].append((args[0] if args else kwargs["hidden_states"]).shape[-2])

        layer.register_forward_pre_hook(note, with_kwargs=True)

    for layer in decoder_layers(module).values():
        watch("layers", layer)
        for block in (layer.self_attn, layer.mlp):
            watch("blocks", block)
    return seen


def layers_are_gathered_ahead(rank, path, shape):
    """The next layer's gather is asked for before a layer computes, to the same bits.

    FSDP2 alone asks for it when that layer has computed; in a backward it is ahead by itself.
    """
    plain, ahead = trained(path, shape), trained(path, shape)
    plain.micro_tokens = ahead.micro_tokens = None
    gather_ahead(ahead.model.module)
    batch = part_of(plain, rows())
    layers = ["gather", "begin 0", "end 0", "gather", "begin 1", "end 1"]
    forwards = [["gather", *layers], ["gather", "gather", "gather", *layers[1:3], *layers[4:]]]
    for engine, forward in zip((plain, ahead), forwards, strict=True):
        with watched_layers(engine.model.module) as events:
            results = one_step(engine, batch)
        assert results.applied
        assert events[: len(forward)] == forward, events
        # The last layer, the first one; then what they leave goes to the ranks.
        after = [event for event in events[len(forward) :] if event in ("gather", "scatter")]
        assert after == ["gather", "gather", "scatter", "scatter", "scatter"], events
    assert one_step(plain, batch) == one_step(ahead, batch)
    return same(contents(plain), contents(ahead))


@contextmanager
def watched_layers(module):
    """What happens within the block: gathers, reduce-scatters, when layers begin and end."""
    events = []
    names = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter"}
    before = []

    def watch(index, layer):
        plain = layer.forward

        def forward(*args, **kwargs):
            events.append(f"begin {index}")
            made = plain(*args, **kwargs)
            events.append(f"end {index}")
            return made

        before.append((layer, vars(layer).get("forward")))
        layer.forward = forward

    for index, layer in enumerate(decoder_layers(module).values()):
        watch(index, layer)
    with Messages(lambda name: name in names and events.append(names[name])):
        yield events
    for layer, forward in before:
        vars(layer).pop("forward")
        if forward is not None:
            layer.forward = forward


def gradients_are_summed_once(rank, path, shape, sequence):
    """Gradients of several micro-batches go to their ranks in the last, or in each; they agree.

    The bytes of what is scattered are those of one micro-batch then, whatever their number.
    """
    each, once = (trained(path, shape, sequence=sequence) for _ in range(2))
    once.reduces_last = True
    batch = part_of(each, rows())
    passes = each.passes(len(list(each.micro_batches(batch))))
    assert passes > 1
    found, counts, sizes = [], [], []
    for engine in (each, once):
        with Messages() as messages:
            found.append(gradients(engine, batch, rows(), ("log_probs", "entropy")))
        # Those of FSDP are flat; blocks that share tokens send theirs beside.
        counts.append(messages.flat["_reduce_scatter_base_"])
        sizes.append(messages.flat_size["_reduce_scatter_base_"])
    parts = len(each.model._parts())
    assert counts == [passes * parts, parts]
    assert sizes[0] == passes * sizes[1] > 0
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    results = [one_step(engine, batch) for engine in (each, once)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    # One pass after several: nothing is left over.
    each.micro_tokens = once.micro_tokens = None
    results = [one_step(engine, batch) for engine in (each, once)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)
    return True


def bytes_of_stages(rank, path, dtype, freeze):
    """Bytes of the weights of one of two stages, and of its gradients and moments."""
    how = {"trained": True, "dtype": dtype, "device": "cpu", "freeze": freeze}
    model = load_sharded(path, **meshes((1, 1, 1), 2), **how)
    engine = StagedTrainEngine(model, Spec(), micro_tokens=20)
    return model.num_bytes(), engine.optimizer.num_bytes()
