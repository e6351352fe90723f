"""What the ranks of a world do in the tests of sharded models."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from functools import cache

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rlflow.batch import lengths, select_rows
from rlflow.engines.hf.layerwise import compiled
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.microbatches import WantedOutputs, add_metrics, flat_places
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.mesh import AXES, CONTEXT_AXES, EXPERT_AXES
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.stages.train import StagedTrainEngine
from rlflow.engines.hf.stages.weights import LateWeights
from rlflow.engines.hf.train import TrainEngine
from rlflow.modelfiles import coded
from tests.engines.examples import Spec, exact, rows, weighted


class Messages(TorchDispatchMode):
    """Counts what ranks send each other within the block, by operator.

    `flat` are messages of one dimension, such as those of FSDP, `flat_size` their bytes; each
    message is `told`.
    """

    def __init__(self, told=None):
        super().__init__()
        self.count, self.flat, self.flat_size, self.told = Counter(), Counter(), Counter(), told

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.count[name] += 1
            if self.told is not None:
                self.told(name)
            sent = [t for t in tree_leaves(args[0]) if torch.is_tensor(t)]
            self.flat[name] += all(tensor.ndim == 1 for tensor in sent)
            self.flat_size[name] += sum(tensor.nbytes for tensor in sent if tensor.ndim == 1)
        return func(*args, **(kwargs or {}))


KINDS = {"lm": ("log_probs", "entropy"), "value": ("values",)}


@cache
def mesh(replicas, fsdp, tp, pp=1):
    shape = (replicas, pp, fsdp, tp)
    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=AXES)


@cache
def expert_mesh(ep, replicas, fsdp, tp, pp=1):
    """The same ranks where experts are apart along `ep`; None where they are not."""
    if ep == 1:
        return None
    ranks = torch.arange(replicas * pp * fsdp * tp).view(replicas, pp, fsdp // ep, ep, tp)
    return DeviceMesh("cpu", ranks, mesh_dim_names=EXPERT_AXES)


@cache
def context_mesh(cp, replicas, fsdp, tp, pp=1):
    """The same ranks where tokens of rows are apart along `cp`; None where they are not."""
    if cp == 1:
        return None
    ranks = torch.arange(replicas * pp * fsdp * tp).view(replicas, pp, fsdp // cp, cp, tp)
    return DeviceMesh("cpu", ranks, mesh_dim_names=CONTEXT_AXES)


def meshes(shape, pp=1):
    """The meshes of ranks along replicate, fsdp, tp, and of those along fsdp along ep and cp."""
    *axes, ep, cp = (*shape, *(1,) * (5 - len(shape)))
    found = {"mesh": mesh(*axes, pp), "experts": expert_mesh(ep, *axes, pp)}
    return found | {"context": context_mesh(cp, *axes, pp)}


def pair(
    path,
    shape,
    *,
    micro_tokens=None,
    spec=None,
    dtype=torch.float64,
    chunk_bytes=None,
    sequence=False,
    cp_by="ulysses",
    pp=1,
    stages=(),
    schedule="1f1b",
    **options,
):
    """Engines of one rank, and of the ranks of a mesh, which alone has chunks."""
    spec = spec or Spec()
    shared = {"dtype": dtype, "device": "cpu", **options}
    apart = {**meshes(shape, pp), "cp_by": cp_by, "sequence": sequence, "stages": stages}
    model = load_sharded(path, **apart, trained=True, **shared)
    engine = ShardedTrainEngine if pp == 1 else StagedTrainEngine
    sharded = engine(model, spec, micro_tokens=micro_tokens, chunk_bytes=chunk_bytes)
    if pp > 1:
        sharded.follow(schedule)
    model = load_model(path, **shared)
    if dtype == torch.float64:
        exact(model.module)
    return TrainEngine(model, spec, micro_tokens=micro_tokens), sharded


def own_rows(sharded, count, uneven):
    """Which rows this rank's part has; `uneven` gives the last part none, the first most."""
    ranks = sharded.model.ranks
    parts = ranks.sizes["replicate"] * ranks.sizes["rows"]
    part = ranks.place("replicate") * ranks.sizes["rows"] + ranks.place("rows")
    if not uneven or parts == 1:
        return list(range(part, count, parts))
    return [row for row in range(count) if row % (parts - 1) == part]


def gradients(engine, batch, whole, kinds):
    """What a step would use, by name."""
    found = {}
    real = engine.optimizer.step
    engine.optimizer.step = lambda scale: found.update(held(engine))
    engine.step(batch, weighted(whole), outputs=kinds, temperature=0.8, max_grad_norm=None)
    engine.optimizer.step = real
    engine.model.version -= 1
    return found


def held(engine):
    if isinstance(engine, ShardedTrainEngine):
        return {n: g.clone() for n, g in engine.optimizer.gradients().items()}
    flat = engine.optimizer.flat
    sums = engine.optimizer.sums
    return {name: flat.view(name, sums[slot.dtype]).clone() for name, slot in flat.slots.items()}


def masters(one):
    """What is trained, where that is not the weights themselves."""
    tensors = one.optimizer.tensors().items()
    return {n.removeprefix("master."): t for n, t in tensors if n.startswith("master.")}


def differ(expected, found, shards, limit):
    """Names whose piece of the expected whole is not what was found."""
    wrong = {}
    assert found
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        piece = expected[name][tuple(slice(*bounds) for bounds in shards[name].box)]
        assert piece.shape == tensor.shape, (name, piece.shape, tensor.shape)
        scale = float(expected[name].abs().max()) + 1e-3
        worst = float((piece.double() - tensor.double()).abs().max()) if piece.numel() else 0.0
        if not worst <= limit * scale:
            wrong[name] = worst / scale
    return wrong


def with_pictures(rank, path, shape, options):
    """`check_equal` on rows of which most have pictures, in single precision."""
    from tests.engines.test_pictures import sampled

    # Above the rounding of gradients: AdamW makes whole steps of what is below its eps.
    how = {"limit": 5e-5, "dtype": torch.float32, "spec": Spec(eps=1e-6)}
    return check_equal(rank, path, shape, batch=sampled(path), **how, **options)


def check_equal(rank, path, shape, limit=1e-10, uneven=False, batch=None, **options):
    """Outputs, gradients, three steps and their metrics are those of one rank.

    The last step is made of rows that come in two parts.
    """
    head = options.get("head", "lm")
    kinds = KINDS[head]
    one, sharded = pair(path, shape, **options)
    batch = rows(n=4) if batch is None else batch
    chosen = own_rows(sharded, len(batch), uneven)
    mine = select_rows(batch, chosen)
    shards = sharded.model.shards()

    expected = one.forward(batch, outputs=kinds, temperature=0.8)
    found = sharded.forward(mine, outputs=kinds, temperature=0.8)
    places = flat_places(lengths(batch["response_tokens"]), torch.tensor(chosen, dtype=torch.int64))
    for name in kinds:
        apart = (expected[name][places] - found[name]).abs()
        assert not len(apart) or apart.max() <= limit * 10, (name, apart.max())

    whole = gradients(one, batch, batch, kinds)
    wrong = differ(whole, gradients(sharded, mine, batch, kinds), shards, limit)
    assert whole.keys() == set().union(*sharded.model.ranks.gather(shards.keys() & whole, ("pp",)))
    assert not wrong, wrong

    asked = {"outputs": kinds, "temperature": 0.8}
    for step in range(3):
        made = in_two if step == 2 and sharded.routers.spec is None else TrainEngine.step
        results = [
            ways(engine, part, weighted(batch), **asked, max_grad_norm=2.0)
            for ways, engine, part in ((TrainEngine.step, one, batch), (made, sharded, mine))
        ]
        assert results[0].applied
        assert results[1].applied
        assert results[0].metrics.keys() == results[1].metrics.keys()
        for name, value in results[0].metrics.items():
            assert abs(results[1].metrics[name] - value) <= limit * 100 * max(1, abs(value)), name
        # From the second step on gradients are those of weights that differ as below.
        bound = limit * (10 if step else 1)
        assert abs(results[0].grad_norm - results[1].grad_norm) <= bound * results[0].grad_norm
    weights = {**one.model.named_tensors(), **masters(one)}
    wrong = differ(weights, sharded.model.named_tensors(), shards, limit * 10)
    assert not wrong, wrong
    return True


def in_two(engine, batch, loss, *, max_grad_norm, **asked):
    """A step of rows of which a third comes first, then the rest."""
    rows, total = torch.arange(len(batch)), {}
    for goes_on, chosen in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
        found = engine.accumulate(select_rows(batch, chosen), loss, goes_on=bool(goes_on), **asked)
        add_metrics(
            total, {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
        )
    return engine.finish({n: float(v) for n, v in total.items()}, max_grad_norm)


def with_options(rank, path, shape, options):
    """`check_equal`, with a dtype by name."""
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    return check_equal(rank, path, shape, **options)


class Wide:
    """torch as a module of transformers sees it that computes in float64 where it asks for less."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def with_exact_layers(rank, path, shape, options):
    """`check_equal` in float64, in which transformers' routers and recurrences compute too."""
    kind = type(transformers.AutoConfig.from_pretrained(path))
    module = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__]
    single = torch.Tensor.float
    module.torch = Wide()
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else single(x)
    try:
        return check_equal(rank, path, shape, **options)
    finally:
        module.torch, torch.Tensor.float = torch, single


def with_short_blocks(rank, path, shape, options):
    """`check_equal` where blocks of moments in 8 bits are of 16 numbers, however rows are cut."""
    before = coded.BLOCK
    coded.BLOCK = 16
    try:
        return check_equal(rank, path, shape, **options)
    finally:
        coded.BLOCK = before


def compiled_alike(rank, path, shape):
    """Compiled layers on several ranks compute what compiled layers of one do, some recomputed."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    compiled.BACKEND = "aot_eager"
    return check_equal(rank, path, shape, limit=1e-5, compiled=True, recompute=1)


def two_halves(rank, path, shape=(2, 1, 1)):
    """Operations of a backward, and of its halves; whether their gradients are the same."""
    _, engine = pair(path, shape)
    batch, asked = rows(n=4), WantedOutputs(KINDS["lm"], 0.8)
    late = LateWeights(engine.model)

    def counted(work):
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops()

    whole = counted(engine.forwarded(batch, weighted(batch), asked).backward)
    expected = {name: g.clone() for name, g in engine.optimizer.gradients().items()}
    engine.optimizer.zero_grad()
    forwarded = engine.forwarded(batch, weighted(batch), asked)
    with late.leaving():
        first = counted(forwarded.backward)
    second = counted(late.add)
    late.give()
    same = all(torch.equal(g, expected[n]) for n, g in engine.optimizer.gradients().items())
    return whole, first, second, same
