"""Seconds of passes that go through stages one behind the other.

One forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): the slowest stage
sets the pace, and the first pass goes through all of them. Ranks with several stages wait for a
part of that: what fills the pipeline is one of them on each. Knows neither graphs nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlflow.graph.placement import Recompute
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.models.flops import TRAINED_FORWARDS, recomputed_layers


def through_stages(
    seconds: Sequence[float],
    passes: int,
    hop: float,
    virtual: int = 1,
    late: Sequence[float] | None = None,
    *,
    times: float = 1,
    fill: float = 0.0,
) -> float:
    """Seconds until so many passes are through ranks that take `seconds` for all of them.

    A pass takes `hop` from a stage to the next, on its way there and back; ranks have `virtual`
    stages each. Of a rank's seconds `late` ones are gradients of weights that nobody waits for,
    with which ranks fill what they would wait: of (p - 1) (F + B + W) they leave (p - 1) (F + B -
    W), table 1 of Qi et al., arXiv:2401.10241, for ZB-H1, where passes are p or more.

    Ranks with several stages fill up the last round with passes of `fill` seconds. Of a pass that
    is not there a rank waits for what it would do in all stages but one: in the backward alone,
    which is all but one of so many `times` a forward, where a round was there before.
    """
    slowest = max(seconds) / passes
    place = seconds.index(max(seconds))
    others = max(1, len(seconds) - 1)
    share = 1 + min(passes - 1, others) / others
    filled = [0.0] * len(seconds) if late is None else [share * each for each in late]
    waits = sum((s - f) / passes for s, f in zip(seconds, filled, strict=True))
    waits -= (seconds[place] - filled[place]) / passes
    filling = waits / virtual + (len(seconds) - 1) * hop
    missing = slowest * (1 if times == 1 or passes < len(seconds) else 1 - 1 / times)
    fill = min(fill, slowest)
    missing = max((missing * (virtual - 1) + fill) / virtual, fill)
    filling += round_fills(passes, len(seconds), virtual) * missing
    return passes * slowest + (passes - 1) * virtual * hop + filling


def round_fills(passes: int, pp: int, virtual: int) -> int:
    """Passes of nobody's rows that fill up the last round of `pp`, where ranks have several."""
    return -passes % pp if virtual > 1 else 0


def piped(
    roof: Roofline,
    load: Load,
    seconds: Callable[[Roofline], float],
    *,
    times: float = 1,
    trained: float = 0.0,
) -> float:
    """Seconds of passes of a part's rows through all stages, each of which takes so many.

    Those of an update take so many `times` a forward, for gradients of `trained` bytes, and may be
    in halves, as `late` says.
    """
    if roof.pp == 1:
        return seconds(roof)
    tokens = roof.ending(load)[0] / roof.passes(load)
    each = of_stages(roof, seconds)
    hop = roof.hop.send(hop_bytes(roof, tokens))
    filled = None
    if roof.splits and times > 1:
        filled = of_stages(roof, lambda stage: late(stage, load))
    passes, fill = roof.passes(load), 0.0
    if round_fills(passes, len(each), roof.virtual):
        fill = max(of_stages(roof, lambda stage: of_one_token(stage, times, trained)))
    return through_stages(each, passes, hop, roof.virtual, filled, times=times, fill=fill)


def of_one_token(stage: Roofline, times: float, trained: float) -> float:
    """Seconds of a pass that fills up: of launches, reading weights, making layers whole.

    And of sums of gradients, where each pass makes them.
    """
    one = stage.launched_by_torch(stage.multiplied(0.0, times * stage.weights), times)
    sent = stage.gathered() * (1 if times == 1 or stage.kept_whole else 2)
    if times > 1 and not stage.reduces_last:
        sent += stage.shared_out(trained)
    return stage.beside(one, sent)


def piped_update(roof: Roofline, load: Load, trained: float, again: Recompute) -> float:
    """The same of an update; see `Roofline.update`.

    What stages train is summed over their replicas when all are done.
    """

    def seconds(stage: Roofline) -> float:
        return stage.update(load, trained, recompute=again)

    share = recomputed_layers(again, roof.shape.layers) / roof.shape.layers
    times = TRAINED_FORWARDS + share
    one = piped(roof, load, seconds, times=times, trained=trained)
    return one if roof.pp == 1 else one + roof.replicas.all_reduce(trained)


def of_stages(roof: Roofline, seconds: Callable[[Roofline], float]) -> list[float]:
    """What each stage takes."""
    return [one for stage, count in roof.stages for one in (seconds(stage),) * count]


def late(stage: Roofline, load: Load) -> float:
    """Seconds of an update's products that make gradients of a stage's weights, but the head's.

    As many operations as those weights take in a forward, with what products of experts wait for.
    What tokens take to other ranks and back is no part of it.
    """
    tokens = stage.ending(load)[0]
    computed = stage.computed(tokens, 0, 0) + stage.waited(tokens)
    return computed / stage.filled(min(tokens, float(stage.micro_tokens)))


def hop_bytes(roof: Roofline, tokens: float) -> float:
    """Bytes that a rank sends to the next stage of a pass of so many tokens."""
    ranks = roof.tp.ranks if roof.sequence else 1
    return tokens * roof.shape.hidden * roof.size / ranks


def bubble(
    seconds: Sequence[float],
    passes: int,
    virtual: int = 1,
    late: Sequence[float] | None = None,
    *,
    times: float = 1,
) -> float:
    """The share of its time that the slowest rank waits for others, or passes nobody's rows."""
    whole = through_stages(seconds, passes, 0.0, virtual, late, times=times)
    return 1 - max(seconds) / whole if whole else 0.0
