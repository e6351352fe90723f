"""What the likeliest tokens of whole distributions cost: time to find them, bytes that hold them.

A model that makes fields with a width, or is trained on such, works on its logits once more,
with several numbers of each place. And what an update holds beside its gradients. Knows fields and
rooflines; neither plans nor measurements.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlflow.graph.fields import PICTURES, PIXELS, Field
from rlflow.graph.graph import Node
from rlflow.graph.placement import Recompute
from rlflow.graph.roles import Drafted, Scoring
from rlflow.graph.rules.steps import mini_batches
from rlflow.modelfiles.chunks import MOST, PLAIN
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.ranks.rank_memory import ACTIVATIONS, Holds
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.plan.plan import Cost, Instance, Spread

# A token of a picture stands for 28 by 28 pixels; files have fewer bytes than these.
VALUE_BYTES = {"int64": 8, "int16": 2, "float32": 4, "bool": 1, "text": 4, "image": 3 * 28 * 28}
FULL_BYTES = 4
# The dtype of numbers of experts.
EXPERTS = "int16"
WIDE = "likeliest tokens"
DRAFTS = "drafts"
VISITING = "states from the host"
ORTHOGONAL = "matrices made orthogonal"
WAITING = "gradients that wait for the last micro-batch"
BEYOND = "activations beyond the gradients that follow them"

# Numbers that are read and written for each logit, all in float32. To find the likeliest: scores,
# two sums of exponentials, the search itself, and a copy without what was found. To compare with
# them: the same without the search, and for the backward the scores again, their exponentials
# weighed, and the others' share.
FOUND, COMPARED = 12, 10 + 21
# Bytes for each likeliest token of a place in a loss: the fields that are read, the ids once
# more, and up to 18 numbers of both sides, their mixture, their products and the gradients.
IN_LOSS = 12 + 8 + 18 * 4
# On a CPU, outputs of micro-batches are joined and put in order beside those themselves.
JOINED = 3


def width(node: Node) -> int:
    """Numbers of one place in the widest field that a node makes, or is trained on; 0 for one.

    Experts that tokens chose, and pixels, are no numbers of a distribution.
    """
    made = list(node.op.outputs)
    read = [bound.field for bound in node.inputs] if node.op.use == "train" else []
    beside = (PIXELS, PICTURES)
    wide = (f for f in (*made, *read) if f.dtype != EXPERTS and f.name not in beside)
    return max((field.width or 0 for field in wide), default=0)


def numbers_alive(node: Node) -> int:
    """Numbers that are alive for each logit while a node's distributions are made."""
    squares = any(field.name == "sum_pi_squared" for field in node.op.outputs)
    scoring = node.role(Scoring)
    several = scoring is not None and isinstance(scoring.temperature, tuple)
    return MOST if squares or several or width(node) else PLAIN


def field_bytes(field: Field, prompt: int, response: int) -> int:
    """Bytes of a field in a row: 8 an integer, 4 a float, 1 a bool, 4 a token of text."""
    tokens = prompt if field.of_prompt else response
    return VALUE_BYTES[field.dtype] * (field.width or 1) * (tokens if field.ragged else 1)


def wide_bytes(fields: tuple[Field, ...], response: int) -> int:
    """Bytes of those fields of a row that have a width."""
    return sum(field_bytes(field, 0, response) for field in fields if field.width)


def likeliest_seconds(node: Node, roof: Roofline, load: Load) -> float:
    """Seconds to find the likeliest tokens of every place, or to compare with another's."""
    if not width(node):
        return 0.0
    numbers = COMPARED if node.op.use == "train" else FOUND
    logits = load.rows * load.lengths.mean * roof.shape.vocab
    return roof.read(numbers * FULL_BYTES * logits)


def holds(node: Node, roof: Roofline, load: Load, *, recompute: Recompute) -> Holds:
    """What a node holds beside the model, by name, in bytes, the largest first.

    A forward leaves what it makes of all its rows where it computes until the last micro-batch is
    done; a loss has the fields of a micro-batch. The rows themselves lie on the host: where that
    is the device they count as well, of an update all mini-batches and the one in work.
    """
    known = roof.holds(node.op.use, load, recompute=recompute, numbers=numbers_alive(node))
    if not width(node):
        return known
    on_host, longest = roof.kind.name == "cpu", load.lengths.longest
    if node.op.use == "train":
        read = tuple(bound.field for bound in node.inputs)
        batches = mini_batches(node)
        kept = (batches + (batches > 1)) * load.rows * wide_bytes(read, longest) if on_host else 0
        tokens = min(load.most_tokens, roof.pass_tokens(load))
        places = min(load.rows * longest, tokens)
        size = kept + places * width(node) * IN_LOSS
    else:
        several = on_host and roof.passes(load) > 1
        size = load.rows * wide_bytes(node.op.outputs, longest) * (JOINED if several else 1)
    return tuple(sorted((*known, (WIDE, int(size))), key=lambda part: -part[1]))


def beside_gradients(
    found: Holds, instance: Instance, roof: Roofline, load: Load, size: int, whole: int
) -> Holds:
    """What an update holds beside `size` bytes of gradients, the largest first.

    Ranks that share a model have no gradients until a backward makes them, layer by layer from the
    last, and each layer's activations are gone by then. So the first micro-batch holds the most as
    its backward begins, without gradients, or as it ends, with those and one layer. The next one
    finds the gradients of the first; of two, it has the rows that are left. Of layers that come
    from the host there are as many at any time, and so there are of micro-batches that pass through
    stages. Gradients that wait for the last micro-batch are
    not a rank's share of them but `whole`, which takes so many bytes more.
    """
    tokens = math.ceil(load.prompts) * load.prompt + math.ceil(load.rows) * load.lengths.longest
    most = roof.pass_tokens(load)
    left = tokens - most + (load.longest_row if tokens > most else 0)
    waiting = whole if instance.reduces_last and tokens > most else 0
    held = dict(found) | ({WAITING: waiting} if waiting else {})
    if not instance.sharded or left >= most or roof.hosts_activations or instance.pp > 1:
        return tuple(sorted(held.items(), key=lambda part: -part[1])) if waiting else found
    size += waiting
    activations = held.pop(ACTIVATIONS, 0)
    one = min(int(roof.layers.kept * min(tokens, most) / roof.cp.ranks), activations)
    later = activations * max(left, 0) // most
    held[BEYOND] = max(activations - size, one, int(later))
    return tuple(sorted(held.items(), key=lambda part: -part[1]))


def at_least(found: Holds, visiting: int, why: str = VISITING) -> Holds:
    """What an update holds, or if that is more what its step makes, by its name.

    By then nothing is left of a backward but the gradients.
    """
    return ((why, visiting),) if visiting > sum(size for _, size in found) else found


def with_drafts(
    known: Holds,
    node: Node,
    instance: Instance,
    roof: Roofline,
    load: Load,
    drafter: Roofline | None,
) -> Holds:
    """What a node holds, and beside it what drafts for its rows: keys and values, and logits.

    The policy reads one token more than were drafted, and keeps logits of each. An engine drafts
    for all that it generates, for the rows that it computes at once, with keys and values in its
    pool. A drafter whose shape is not known counts nothing: it is None.
    """
    engine = instance.engine_plan
    own = node.role(Drafted) or Drafted(by="")
    tokens = engine.verified if engine.own_process else own.tokens
    if drafter is not None:
        size = drafting_bytes(tokens, roof, drafter, load, most=own.most)
    elif engine.drafts_by_options:
        size = drafting_bytes(tokens, roof, roof, load, beams=engine.beams)
    else:
        return known
    return tuple(sorted((*known, (DRAFTS, size)), key=lambda part: -part[1]))


def drafting_bytes(
    tokens: int,
    roof: Roofline,
    drafter: Roofline,
    load: Load,
    *,
    beams: int = 1,
    most: int | None = None,
) -> int:
    """Bytes for so many drafted tokens a row; a drafter makes logits of `beams` tokens at a time.

    It drafts for `most` rows, or all; every row has room for drafts in the policy's cache.
    A draft model that stays as it is predicts the tokens of the policy: `roof` stands for it.
    """
    rows, cache = load.most or load.rows, 0.0
    drafted = rows if most is None else min(rows, most)
    if roof.serving is not None:
        drafted = roof.serving.rows(rows)
    else:
        cache = drafted * (load.longest_row + tokens) * drafter.cache_bytes
        cache += rows * tokens * roof.cache_bytes
    return int(cache) + tokens * roof.scores(drafted) + beams * drafter.scores(drafted)


def carried(cost: Cost, rows: float, spread: Spread, *, on_host: bool) -> Cost:
    """The cost of a transfer that brings so many bytes of wide fields to the parts of a spread.

    Rows lie on the host: devices hold them where they are the host's own.
    """
    size = int(rows / len(spread.parts)) if on_host else 0
    if not size:
        return cost
    return replace(cost, transient=(cost.transient or 0) + size, holds=(*cost.holds, (WIDE, size)))
