"""Rows cut over ranks: whose tokens can lie apart, and how such ranks can attend.

Ranks exchange heads for tokens ("ulysses"), which takes as many heads on each, or keys and values
go round them ("ring"), which has no windows, and no states that go from token to token. Read by
plans and by engines. Knows configs; neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from rlflow.errors import Finding
from rlflow.modelfiles.configs import text_config
from rlflow.modelfiles.families import Family
from rlflow.modelfiles.layouts.carrying import NOTHING, Carrying

_By = Literal["ulysses", "ring"]
# Families that transformers gives windows of rows where a config says nothing of them.
WINDOWED = {
    *("afmoe", "beam", "cohere2", "cohere2_moe", "cwm", "exaone4", "exaone_moe", "flint", "gemma2"),
    *("gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa"),
    *("granitemoe_swa", "kolibri1", "mimo_v2_flash", "ministral", "mistral"),
    *("modernbert-decoder", "moshi", "olmo3", "vaultgemma"),
}
# Of which every rank may have other tokens, or other heads; hybrids where they are `parted`.
CUT = ("full", "latent", "hybrid")


def windowed(config: Mapping[str, Any]) -> bool:
    """Whether layers of the model of a config see windows of a row alone."""
    text = text_config(config)
    said = text.get("sliding_window", text.get("model_type") in WINDOWED)
    if not said or not text.get("use_sliding_window", True):
        return False
    layers = text.get("layer_types")
    return layers is None or "sliding_attention" in layers


def ways_to_attend(
    heads: int, cp: int, tp: int, *, windows: bool, carrying: Carrying = NOTHING
) -> tuple[_By, ...]:
    """How `cp` ranks can attend, of a model with so many heads, of which `tp` ranks have a part.

    Heads of layers that carry states are whole on each of those.
    """
    found: dict[_By, bool] = {
        "ulysses": heads % (cp * tp) == 0 and carrying.parts(cp),
        "ring": not windows and not carrying.layers,
    }
    return tuple(way for way in get_args(_By) if found[way])


def context_finding(
    path: str,
    family: Family,
    heads: int,
    cp: int,
    tp: int = 1,
    by: _By | None = None,
    carrying: Carrying = NOTHING,
    *,
    windows: bool = False,
) -> Finding | None:
    """E537 where the tokens of a model's rows cannot lie on `cp` ranks; None where they can.

    With `by` in that way, else in any.
    """
    if cp == 1:
        return None
    what = f"cp={cp}: rows of model {path!r} cannot be cut over ranks"
    if family.attention not in CUT or (family.attention == "hybrid" and not family.parted):
        return _never(what, family)
    # Tokens of a picture that see each other both ways go round no ring.
    windows = windows or family.sees == "soft"
    ways = ways_to_attend(heads, cp, tp, windows=windows, carrying=carrying)
    if by in ways or (by is None and ways):
        return None
    other = next(iter(ways), None)
    divisors = [n for n in range(1, heads // tp + 1) if heads % (n * tp) == 0 and carrying.parts(n)]
    nearest = max((n for n in divisors if n <= cp), default=1)
    uneven = f"{heads} heads" + (f" over tp={tp}" if tp > 1 else "")
    got, whose = [uneven], "the heads"
    if carrying.layers:
        got.append(f"{carrying.heads} in layers that carry states, which go round no ring")
        whose = "the heads of both"
    elif windows:
        got.append("windows of rows, which no ring has")
    return Finding(
        code="E537",
        what=f"{what} by {by}" if by else what,
        got=", ".join(got),
        expected=f"cp= of {', '.join(map(str, divisors)) or 'no number'}, which divides {whose}",
        fix=f'rf.on(..., cp={cp}, cp_by="{other}")' if other else f"rf.on(..., cp={nearest})",
    )


def _never(what: str, family: Family) -> Finding:
    """A family whose rows no ranks can cut."""
    kinds = {"hybrid": "layers that carry states from token to token, and were never cut by heads"}
    return Finding(
        code="E537",
        what=what,
        got=kinds.get(family.attention, f"{family.attention} attention"),
        expected="attention between tokens, full or latent, or states of heads that can be cut",
        fix="rf.on(..., cp=1)",
    )
