"""Fields of likeliest tokens: the time to find them, and the memory that holds them in a plan."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs import distributions
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.distributions import IN_LOSS, WIDE
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import Cluster, parse_cluster
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.plan import Action, Cost, Instance, Plan, Spread
from tests.scheduler.strategies import graph_of

ROWS, TOKENS, VOCABULARY = 32, 100, 151_936
H100 = parse_cluster("h100:2", 1)
CPU = parse_cluster("cpu:2@64GB", 1)
ONE = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
APART = rf.Placement(pools={"train": 1, "look": 1}, assign={"*": rf.on("train")})
APART = APART.model_copy(update={"assign": {**APART.assign, "ref": rf.on("look")}})
EACH = 4 + 8
"""Bytes of a likeliest token: its log-prob and its id."""


@rf.op(per="row")
def surest(top_log_probs: rf.Token[float]) -> rf.Row[float]:
    return top_log_probs.max()


def distilling(
    top_k: int | None, *, rows: int = ROWS, batches: int = 2, looked_at: bool = False
) -> Graph:
    """A student of a teacher's likeliest tokens, or of those that were sampled.

    With `looked_at` an op of its own reads their log-probs as well, row by row.
    """

    def declare() -> None:
        actor = rf.Model("actor", "shape:qwen2.5-0.5b", optimizer=rf.AdamW(lr=1e-6))
        ref = rf.Model("ref", "shape:qwen2.5-0.5b")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=rows // 2)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=TOKENS, ignore_eos=True)
        field = "teacher_log_probs" if top_k is None else None
        scored = ops.log_probs(ref, samples, top_k=top_k, field=field)
        loss = rf.DistillLoss("supervised" if top_k is None else "jsd")
        ops.update(actor, samples, scored, loss=loss, mini_batches=batches)
        if looked_at:
            ops.metrics(surest(scored))

    return graph_of(declare, "distilling")


def planned(graph: Graph, cluster: Cluster = H100, where: rf.Placement = ONE) -> Plan:
    return compile_plan(graph, where, cluster, backend="ray").plan


def runs(plan: Plan, node: str) -> list[Action]:
    return [a for a in plan.actions if a.kind == "run" and a.node == node]


def wide(action: Action) -> int:
    """Bytes of likeliest tokens that an action holds."""
    assert sum(size for _, size in action.cost.holds) == action.cost.transient
    return dict(action.cost.holds).get(WIDE, 0)


def test_a_forward_holds_what_it_makes_of_all_its_rows() -> None:
    plan = planned(distilling(64))
    (forward,) = runs(plan, "ref.log_probs")
    assert ROWS * TOKENS * 64 * EACH == wide(forward)
    assert 0 == wide(runs(planned(distilling(None)), "ref.log_probs")[0])


def test_a_chunk_holds_what_it_makes_of_its_own_rows() -> None:
    where = APART.model_copy(update={"stream": 4})
    chunks = runs(planned(distilling(64), H100, where), "ref.log_probs")
    assert [ROWS * TOKENS * 64 * EACH // 4] * 4 == [wide(chunk) for chunk in chunks]


def test_a_loss_holds_the_tokens_of_a_micro_batch() -> None:
    plan = planned(distilling(64))
    (update,) = runs(plan, "actor.update")
    assert ROWS // 2 * TOKENS * 64 * IN_LOSS == wide(update)
    graph, instance = plan.graph, plan.instance(str(update.instance))
    small = replace(instance, micro_tokens=1000)
    held = dict(costs(graph).run(graph.node("actor.update"), small, 1).holds)
    assert 1000 * 64 * IN_LOSS == held[WIDE]


def test_memory_grows_with_k_by_what_each_token_takes() -> None:
    few, many = (planned(distilling(k)) for k in (64, 128))
    for name, each in (("ref.log_probs", ROWS * EACH), ("actor.update", ROWS // 2 * IN_LOSS)):
        grown = runs(many, name)[0].cost.transient - runs(few, name)[0].cost.transient
        assert TOKENS * 64 * each == grown


def test_a_plan_that_does_not_fit_for_its_likeliest_tokens_is_refused() -> None:
    """Without them the update holds its logits, which do not depend on k."""
    graph = distilling(20_000, rows=4096)
    with pytest.raises(PlanError) as caught:
        planned(graph)
    assert any(WIDE in f"{found.what} {found.got}" for found in caught.value.findings)
    assert planned(distilling(None, rows=4096)).actions


def transfers(plan: Plan) -> list[Action]:
    return [a for a in plan.actions if a.kind == "transfer" and a.node == "ref.log_probs"]


@pytest.mark.parametrize("stream", [1, 4])
def test_transfers_hold_the_rows_they_bring_where_those_lie_on_the_device(stream: int) -> None:
    """Of `top_rest`, which has one number a token, only bytes are moved."""
    where = APART.model_copy(update={"stream": stream})
    size = ROWS * TOKENS * 64 * EACH
    for cluster, share in ((CPU, 1), (H100, 0)):
        (moved,) = transfers(planned(distilling(64), cluster, where))
        assert size * share == wide(moved)
        assert size + ROWS * TOKENS * 4 == moved.cost.moved


def test_a_transfer_of_a_chunk_holds_its_rows() -> None:
    where = APART.model_copy(update={"stream": 4})
    where = where.model_copy(update={"assign": {**where.assign, "surest": rf.on("train")}})
    moved = transfers(planned(distilling(64, looked_at=True), CPU, where))
    chunks = [a for a in moved if a.chunk is not None]
    assert 4 == len(chunks)
    assert {ROWS * TOKENS * 64 * 4 // 4} == {wide(chunk) for chunk in chunks}


def test_each_device_holds_its_part_of_what_a_transfer_brings() -> None:
    four = parse_cluster("cpu:4@64GB", 1)
    where = APART.model_copy(update={"pools": {"train": 3, "look": 1}})
    (two,) = transfers(planned(distilling(64), four, where))
    assert 3 == len(two.makes.parts)
    assert ROWS * TOKENS * 64 * EACH // 3 == wide(two)


def test_on_a_cpu_rows_count_beside_what_is_worked_on() -> None:
    """Of an update both mini-batches and the one in work; a forward joins its micro-batches."""
    graph = distilling(64)
    made = costs(graph, CPU)
    plan = planned(graph, CPU)
    update = runs(plan, "actor.update")[0]
    mini = ROWS // 2 * TOKENS * 64
    assert 3 * mini * EACH + mini * IN_LOSS == wide(update)
    alone = plan.instance(str(runs(plan, "ref.log_probs")[0].instance))
    node, every = graph.node("ref.log_probs"), ROWS * TOKENS * 64 * EACH
    for micro, copies in ((32_768, 1), (1000, 3)):
        instance = replace(alone, micro_tokens=micro)
        assert copies * every == dict(made.run(node, instance, 1).holds)[WIDE]


def costs(graph: Graph, cluster: Cluster = H100) -> Costs:
    shapes = {model.name: model_shape(model) for model in graph.models}
    return Costs(graph=graph, cluster=cluster, shapes=shapes)


def seconds(top_k: int | None, node: str) -> float:
    graph = distilling(top_k)
    name = node.partition(".")[0]
    trained = name == "actor"
    instance = Instance(
        name=name, model=name, pool="all", devices=(0,), uses=("forward",), trained=trained
    )
    found = costs(graph).run(graph.node(node), instance, 1).seconds
    assert found is not None
    return found


@pytest.mark.parametrize(("node", "numbers"), [("ref.log_probs", 12), ("actor.update", 31)])
def test_the_search_reads_and_writes_the_logits_of_every_place(
    node: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole iteration: two mini-batches of half the rows; what is not searched by torch."""
    kind = H100.kind
    expected = ROWS * TOKENS * VOCABULARY * numbers * 4 / (kind.bandwidth * kind.reached)
    monkeypatch.setenv("RLFLOW_HEAD_KERNEL", "off")
    assert seconds(64, node) - seconds(None, node) == pytest.approx(expected)
    assert seconds(64, node) == seconds(4096, node)


def test_measurements_of_another_k_are_others() -> None:
    for node in ("ref.log_probs", "actor.update"):
        found = {keys.work(distilling(k).node(node)) for k in (64, 128, 64)}
        assert 2 == len(found)
    narrow = keys.work(distilling(None).node("actor.update"))
    assert "*" not in narrow
    assert "top_ids*64" in keys.work(distilling(64).node("actor.update"))


@pytest.mark.torch
@pytest.mark.parametrize("form", ["jsd", "forward_kl", "reverse_kl", "full"])
def test_a_loss_allocates_no_more_than_is_planned(form: str) -> None:
    """Everything that is alive at once while a micro-batch is compared, but for its logits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from rlflow.batch import make_batch, ragged
    from rlflow.ops.bodies.update import loss_function
    from rlflow.ops.math.aggregate import Totals

    class Alive(TorchDispatchMode):
        now = peak = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in known:
                    known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, storage._cdata)
            return made

        def free(self, key):
            self.now -= known.pop(key)

    known: dict[int, int] = {}
    rows, tokens, k = 4, 8, 2048
    places = rows * tokens
    ids = torch.arange(k).expand(places, k).contiguous()
    scores = torch.randn(places, k + 1).log_softmax(-1)
    sizes = torch.full((rows,), tokens)
    fields = {
        "response_tokens": torch.zeros(places, dtype=torch.int64),
        "response_mask": torch.ones(places, dtype=torch.bool),
        "old_log_probs": torch.zeros(places),
        "top_log_probs": scores[:, :k].contiguous(),
        "top_ids": ids,
        "top_rest": scores[:, k].contiguous(),
    }
    batch = {name: ragged(value, sizes) for name, value in fields.items()}
    batch["advantages"] = torch.ones(rows)
    whole = rf.PolicyLoss(kl_coef=0.1, kl="full")
    spec = whole if form == "full" else rf.DistillLoss(form)
    loss = loss_function(spec, Totals(tokens=float(places), rows=float(rows)))
    given = torch.zeros(places, k, requires_grad=True)
    outputs = {"log_probs_at": given, "rest_at": torch.zeros(places, requires_grad=True)}
    outputs["log_probs"] = torch.zeros(places, requires_grad=True)
    outputs = {name: outputs[name] for name in spec.outputs()}
    with Alive() as alive:
        made, _ = loss(outputs, make_batch(batch, rows))
        made.backward()
    beside = 8 + 4
    """The ids on the device and the student's log-probs, which the forward has made."""
    planned = places * k * distributions.IN_LOSS
    assert 0.7 * planned < alive.peak + places * k * beside <= planned


def test_rows_that_come_to_a_device_are_beside_what_it_needs_anyway() -> None:
    halves = Spread(parts=((0,), (1,)), rule="balanced")
    needs = Cost(transient=100, holds=(("logits", 100),))
    come = distributions.carried(needs, 801.0, halves, on_host=False)
    assert needs == come
    come = distributions.carried(needs, 801.0, halves, on_host=True)
    assert (500, (("logits", 100), (WIDE, 400))) == (come.transient, come.holds)
    unknown = distributions.carried(Cost(transient=None), 801.0, halves, on_host=True)
    assert 400 == unknown.transient
