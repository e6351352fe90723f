"""Rules of the verifier: how rows lie over devices, and that they are carried where that differs.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rlflow.graph.fields import Edge
from rlflow.graph.graph import Node
from rlflow.graph.roles import Learning
from rlflow.graph.rules.check import most_rows, num_prompts, row_counts
from rlflow.scheduler.plan.plan import HOST, Action, Chunk, Spread
from rlflow.scheduler.verify.happens_before import Facts, runs_only_with

OWN_RULES = ("whole", "balanced", "balanced rows", "balanced samples", "generated")

Carried = tuple[str, Spread | None, Chunk | None]


def chunks_are_legal(facts: Facts) -> Iterator[str]:
    """Only what may be cut is cut, between groups, and the chunks of a node differ in nothing."""
    graph = facts.plan.graph
    for name, (first, *others) in facts.runs.items():
        if first.chunk is None:
            continue
        node = graph.node(name)
        op = node.op
        at_once = op.per == "batch" or op.collective or op.effect != "pure"
        follows = _steps_follow(node, first.chunk) or _adds_up(facts, node, first.chunk)
        if at_once and not follows:
            yield f"{first.id} is a chunk of a node that takes its batch at once"
        along = op.rows in ("expand", "same") and not op.chooses
        if op.closing or not node.always or not (along or at_once):
            yield f"{first.id} is a chunk of a node that has no rows of every iteration"
        yield from _cut_is_fair(facts, node, first)
        fed = any(facts.runs[source][0].chunk for source in node.sources)
        alike = all(_cut_alike(facts, source, first.chunk) for source in node.sources)
        alone = dict(node.params).get("background") is True
        if (fed or op.rows != "expand") and not (alike or alone):
            yield f"{name} is cut, and not all of what it reads is, or otherwise"
        if first.begins is not (op.rows == "expand" and not fed):
            yield f"{first.id} begins a cut that it does not, or does not say so"
        for a in others:
            if _in_full(a) != _in_full(first):
                yield f"{a.id} is done otherwise than {first.id}"
        pieces = sorted(facts.runs[name], key=lambda a: a.chunk.index if a.chunk else 0)
        in_turn = first.ends_first or facts.only_adds(first)
        for before, after in pairwise(pieces if in_turn else ()):
            if not facts.comes_before(before.id, after.id, 0):
                yield f"{after.id} goes on before {before.id} is over"


def _steps_follow(node: Node, chunk: Chunk) -> bool:
    """Whether each optimizer step of an update is of rows of one chunk, in the rows' order."""
    said = dict(node.params)
    once = node.op.use == "train" and said.get("epochs") == 1 and said.get("shuffle") is False
    return once and chunk.by == "prompts" and said["mini_batches"] % chunk.count == 0


def _adds_up(facts: Facts, node: Node, chunk: Chunk) -> bool:
    """Whether gradients of complete groups may be added up before the others are there.

    Of the one step of an update whose loss chooses nothing, and averages nothing, over all rows.
    """
    said = dict(node.params)
    once = node.op.use == "train" and said.get("epochs") == 1 and said.get("mini_batches") == 1
    if not once or chunk.by != "groups" or said.get("background"):
        return False
    routed = facts.plan.graph.model(str(node.model)).router is not None
    return bool(said["loss"].adds_up) and not routed


def _cut_is_fair(facts: Facts, node: Node, first: Action) -> Iterator[str]:
    """Pieces are equally many whole prompts, or rows of an op that reads no others of its group."""
    prompts, chunk = num_prompts(facts.plan.graph, node), first.chunk
    assert chunk is not None
    if chunk.by == "prompts":
        if prompts is None or prompts % chunk.count:
            count = f"{chunk.count} chunks, within the groups of its {prompts} prompts"
            yield f"{node.name} is cut into {count}"
        return
    groups, trains = chunk.by == "groups", node.op.use == "train"
    rows = prompts if groups else most_rows(facts.plan.graph, node)
    if rows is None or rows < chunk.count:
        what = "groups" if groups else "rows"
        yield f"{node.name} is cut into {chunk.count} chunks, and has {rows} {what}"
    if node.op.per != "row" and not groups:
        yield f"{node.name} is cut between rows of a group"
    if groups and not (trains or node.op.per in ("row", "group")):
        yield f"{node.name} is cut between groups, and reads all of them"
    if groups and first.takes is not None and first.takes.pieces > 1:
        yield f"{node.name} is cut by groups, and its parts have some samples of each"
    if node.op.rows == "expand" and not first.begins:
        yield f"{node.name} makes rows of rows that end one by one"
    if node.op.uneven == "refuse" and first.takes is not None and len(first.takes.parts) > 1:
        yield f"{node.name} refuses uneven parts, and rows that end together have no even ones"
    if node.op.rows == "expand" and "ignore_eos" in dict(node.params):
        yield f"{node.name} is cut by who ends first, and all end together"


def _cut_alike(facts: Facts, source: str, chunk: Chunk) -> bool:
    """Whether a node is cut in the same way into as many chunks."""
    other = facts.runs[source][0].chunk
    return other is not None and (other.count, other.by) == (chunk.count, chunk.by)


def _in_full(a: Action) -> tuple[object, ...]:
    """What the chunks of a node have in common."""
    by = None if a.chunk is None else a.chunk.by
    where = (a.pool, a.devices, a.instance, a.takes, a.makes)
    return (*where, a.needs, a.reads, a.every, a.within, a.begins, by)


def _piece_read(target: Action) -> Chunk | None:
    """The chunk that an action reads; pieces by who ends first begin with all prompts."""
    return None if target.ends_first else target.chunk


def _read_by(facts: Facts, node: str, chunk: Chunk | None) -> list[Action]:
    """The runs of a node that make what a chunk reads; None stands for the whole batch."""
    runs = list(facts.runs[node])
    return runs if chunk is None else [a for a in runs if a.chunk == chunk] or runs


def data_is_there(facts: Facts) -> Iterator[str]:
    """A node starts after all that it reads was made, and is made at least as often as read."""
    for edge in facts.plan.graph.edges:
        if edge.kind != "data":
            continue
        for target in facts.runs[edge.target]:
            for source in _read_by(facts, edge.source, _piece_read(target)):
                yield from _is_made(facts, edge, source, target)


def _is_made(facts: Facts, edge: Edge, source: Action, target: Action) -> Iterator[str]:
    if not facts.comes_before(source.id, target.id, edge.distance):
        yield f"{target.id} may start before {source.id} has made {', '.join(edge.fields)}"
    if not runs_only_with(target, source):
        yield (
            f"{target.id} runs every {target.every} iterations and reads {source.id}, "
            f"which runs every {source.every}, within {source.within}"
        )


def spreads_are_right(facts: Facts) -> Iterator[str]:
    """Rows lie on their action's devices as its op and its instance allow."""
    for a in (a for runs in facts.runs.values() for a in runs):
        node = facts.plan.graph.node(str(a.node))
        for word, spread, due in (
            ("takes", a.takes, node.inputs),
            ("makes", a.makes, node.op.outputs),
        ):
            if (spread is not None) != bool(due):
                yield f"{a.id} {word} {'no rows' if due else 'rows'}: not what its op declares"
            if spread is not None and (word == "takes" or spread is not a.takes):
                yield from _is_formed(facts, a, word, spread)
        if a.takes is not None:
            yield from _is_dispatched(facts, node, a, a.takes)
        if a.makes is not None:
            yield from _is_left(facts, node, a, a.makes)


def _is_formed(facts: Facts, a: Action, word: str, spread: Spread) -> Iterator[str]:
    """Parts have devices of the action, each once, and those that share layers share rows."""
    held, able = spread.devices, facts.rows_on(a)
    wrong = held != able and (len(set(held)) < len(held) or not set(held) <= set(able))
    if wrong or not all(spread.parts):
        yield f"{a.id} {word} rows in parts {spread.parts}, it has devices {list(able)}"
    if (spread.pieces > 1) is not (spread.rule == "balanced samples"):
        yield f"{a.id} {word} rows in {spread.pieces} pieces by the rule {spread.rule}"
    if (spread.rule == "whole") is not (len(spread.parts) == 1):
        yield f"{a.id} {word} {len(spread.parts)} parts by the rule {spread.rule}"
    instance = facts.instances.get(a.instance or "")
    if instance is None:
        return
    if instance.sharded and held != instance.devices and set(held) != set(instance.devices):
        yield f"{a.id} leaves out ranks of {instance.name}, which compute together"
    if instance.row_ranks == 1 or instance.options is not None:
        return
    part_of = {device: number for number, part in enumerate(spread.parts) for device in part}
    for peers in instance.row_groups:
        if len({part_of.get(device) for device in peers}) > 1:
            yield f"{a.id} {word} different rows on devices {list(peers)}, which share them"


def _is_dispatched(facts: Facts, node: Node, a: Action, spread: Spread) -> Iterator[str]:
    """The rows that a node reads lie as its op says."""
    instance = facts.instances.get(a.instance or "")
    most = 1 if a.devices == (HOST,) else len(a.devices) // (instance.row_ranks if instance else 1)
    how = node.op.dispatched
    unreached = node.op.collective and instance is None
    # All replicas know of all rows.
    lasting = node.op.rows == "expand" and (node.op.recalls or node.op.chooses)
    if how in ("all", "first") or unreached or lasting or most == 1:
        alone = how == "first" or unreached
        wanted = set(a.devices[:1]) if alone else set(facts.rows_on(a))
        if len(spread.parts) != 1 or set(spread.devices) != wanted:
            yield f"{a.id} takes parts {spread.parts}, and its rows are not to be split"
    elif how == "parts":
        alike = all(facts.runs[source][0].makes == spread for source in node.sources)
        if not alike or spread.rule not in OWN_RULES:
            yield f"{a.id} takes parts {spread.parts} that its sources do not leave so"
    elif len(spread.parts) != most or len(spread.devices) != len(facts.rows_on(a)):
        yield f"{a.id} takes {len(spread.parts)} parts, its devices hold {most}"
    elif _goes_on(facts, node, a):
        if spread != facts.runs[str(node.rows_of)][0].makes:
            yield f"{a.id} takes {spread.describe()}, an engine has cached its rows elsewhere"
    elif how == "split" and spread.rule == "balanced samples":
        yield from _may_be_shared(facts, node, a, spread)
    elif how == "split" and spread.rule == "balanced rows":
        yield from _may_be_cut(facts, node, a, len(spread.parts))
    elif spread.rule != ("balanced" if how == "split" else how):
        yield f"{a.id} takes parts by the rule {spread.rule}, its op says {how}"
    cut = len(spread.parts) > 1 and how in ("split", "parts")
    if cut and node.op.per == "batch" and not node.op.collective:
        yield f"{a.id} is a batch op and gets its rows in {len(spread.parts)} parts"


def _may_be_cut(facts: Facts, node: Node, a: Action, parts: int) -> Iterator[str]:
    """The samples of a prompt lie apart where prompts are too few, and nothing is of a group."""
    learning = node.role(Learning)
    together = node.op.per == "group" or node.op.rows == "expand"
    if learning is not None:
        together = any(name in learning.loss.needs() for name in ("group", "pair"))
    if together:
        yield f"{a.id} cuts groups, and computes with groups"
    prompts, counts = num_prompts(facts.plan.graph, node), row_counts(facts.plan.graph, node)
    fewest = prompts if counts is None or prompts is None else min(prompts, counts.least)
    steps = 1 if learning is None else learning.mini_batches
    if fewest is None or fewest // steps >= parts:
        yield f"{a.id} cuts groups over {parts} parts, and there are {fewest} prompts"


def _may_be_shared(facts: Facts, node: Node, a: Action, spread: Spread) -> Iterator[str]:
    """A prompt's samples are drawn in equal pieces, where prompts are too few for all parts."""
    prompts, counts = num_prompts(facts.plan.graph, node), row_counts(facts.plan.graph, node)
    fewest = prompts if counts is None or prompts is None else min(prompts, counts.least)
    drawn, parts = dict(node.params).get("n"), len(spread.parts)
    if node.op.rows != "expand" or node.op.per != "row" or drawn is None:
        yield f"{a.id} shares out samples, and draws none by themselves"
        return
    if drawn % spread.pieces:
        yield f"{a.id} draws {drawn} samples of a prompt in {spread.pieces} pieces"
    if fewest is None or fewest >= parts:
        yield f"{a.id} shares out samples over {parts} parts, and there are {fewest} prompts"
    elif fewest * spread.pieces < parts:
        yield f"{a.id} has {fewest} prompts in {spread.pieces} pieces for {parts} parts"


def _goes_on(facts: Facts, node: Node, a: Action) -> bool:
    """Whether a node goes on with rows that its own engine has generated, in several parts."""
    engine = facts.instances.get(a.instance or "")
    made = facts.runs[str(node.rows_of)][0]
    if engine is None or engine.options is None or made.makes is None:
        return False
    going_on = node.op.rows == "same" and node.op.dispatched == "split"
    return going_on and made.makes.rule == "generated" and made.instance == a.instance


def _is_left(facts: Facts, node: Node, a: Action, spread: Spread) -> Iterator[str]:
    """Rows stay where they were read; a rollout's lie with the prompts they came from."""
    if a.takes is None:
        if len(spread.parts) != 1:
            yield f"{a.id} makes rows of no others in {len(spread.parts)} parts"
        return
    grown = node.op.rows == "expand" and len(a.takes.parts) > 1
    if spread.parts != a.takes.parts or spread.rule != ("generated" if grown else a.takes.rule):
        yield f"{a.id} takes {a.takes.describe()} and makes {spread.describe()} elsewhere"


def rows_are_carried(facts: Facts) -> Iterator[str]:
    """Rows are carried once wherever they are read otherwise than they lie, and no others."""
    wanted: dict[Carried, set[str]] = {}
    carried: dict[Carried, Action] = {}
    for a in facts.plan.actions:
        if a.kind == "transfer":
            key = (str(a.node), a.makes, a.chunk)
            if key in carried:
                yield f"{a.id} carries what {carried[key].id} carries"
            carried[key] = a
            yield from _carries(facts, a)
    for edge in facts.plan.graph.edges:
        if edge.kind != "data" or facts.one_process:
            continue
        for target in facts.runs[edge.target]:
            source = _read_by(facts, edge.source, _piece_read(target))[0]
            if _in_place(source, target):
                continue
            if target.takes is None:
                yield f"{target.id} reads rows of {source.id} and takes none"
                continue
            key = (edge.source, target.takes, _piece_read(target))
            wanted.setdefault(key, set()).update(edge.fields)
            found = carried.get(key)
            if found is None or not set(edge.fields) <= set(found.fields):
                yield f"nothing carries {', '.join(edge.fields)} of {source.id} to {target.id}"
            elif not facts.comes_before(found.id, target.id, 0):
                yield f"{target.id} may start before {found.id} has carried its rows"
    for key, a in carried.items():
        useless = sorted(set(a.fields) - wanted.get(key, set()))
        if useless:
            yield f"{a.id} carries {', '.join(useless)}, which nobody reads there"


def _in_place(source: Action, target: Action) -> bool:
    """Whether rows are read just as they lie.

    A rule of a user's own is asked by each reader. What one evens out chunk by chunk and the
    other not lies otherwise, unless there is one part, or rows lie as they were generated.
    """
    spread = target.takes
    if spread is None or spread.rule not in OWN_RULES or source.makes != spread:
        return False
    return source.chunk == _piece_read(target) or spread.rule in ("whole", "generated")


def _due_alike(one: Action, other: Action) -> bool:
    return runs_only_with(one, other) and runs_only_with(other, one)


def _carries(facts: Facts, a: Action) -> Iterator[str]:
    """A transfer takes rows as their node left them, after it did, to the ranks that read them."""
    for source in _read_by(facts, str(a.node), a.chunk):
        if a.takes != source.makes or a.makes is None or set(a.devices) != set(a.makes.devices):
            yield f"{a.id} takes and makes other parts than its ends"
        if not facts.comes_before(source.id, a.id, 0) or not _due_alike(a, source):
            yield f"{a.id} may start before {source.id} has made the rows"
    if a.transport != "object store":
        yield f"{a.id} goes by {a.transport}"
