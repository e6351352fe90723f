"""What every rank of an engine holds, beside the weights that are staged for it, by hashes.

This file knows neither when something is compared nor what follows from a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from rlflow.engines.hf.lora import is_adapter
from rlflow.engines.process.sglang.checksums import TABLE, hashed, hashes, weight_layout
from rlflow.engines.reshard.bucket_layout import scale_name

Ask = Callable[[str, Mapping[str, Any]], Any]


def hash_differences(
    ask: Ask,
    staged: Mapping[str, Tensor],
    of: Mapping[str, str],
    *,
    cuda: bool,
    kv_heads: int | None = None,
) -> dict[str, tuple[str, str]]:
    """The weights whose hashes differ, by the engine's names: (staging, engine).

    `ask` gets the engine's answers to what it is asked, `of` says which of its models. With
    several ranks a name has the number of its rank behind it; beyond the model's `kv_heads` ranks
    have the same ones. Staged weights that the engine has
    no place for have their own names, and nothing on its side.
    """
    answered: list[dict[str, str]] = ask("checksums", of)
    ranks = [{name: held[name] for name in held if not name.endswith(TABLE)} for held in answered]
    found = {}
    for rank, held in enumerate(ranks):
        mine = _expected(ask, held, staged, of, (rank, len(ranks), kv_heads), cuda=cuda)
        where = f" of rank {rank}" if len(ranks) > 1 else ""
        wrong = (name for name in held if mine[name] != held[name])
        found.update({f"{name}{where}": (mine[name], held[name]) for name in wrong})
    for name in _nowhere(ranks[0], staged):
        found[name] = (hashed([staged[name]]), "")
    return found


def _expected(
    ask: Ask,
    held: Iterable[str],
    staged: Mapping[str, Tensor],
    of: Mapping[str, str],
    place: tuple[int, int, int | None],
    *,
    cuda: bool,
) -> dict[str, str]:
    """What a rank's weights should hash to, were they those that are staged."""
    names = list(held)
    sent = [name for name in names if is_adapter(name)]
    whole = [name for name in names if name not in sent]
    if not cuda:
        return hashes(whole, staged, *place) | hashes(sent, staged)
    # What is hashed on a GPU is hashed in another way, which the engine alone knows.
    known = {name: made for name, made in weight_layout(whole, staged, *place).items() if made[0]}
    answered: dict[str, str] = ask("hashes", {"layout": known, **of})
    return dict.fromkeys(whole, "") | answered | hashes(sent, staged)


def _nowhere(held: Iterable[str], staged: Mapping[str, Tensor]) -> list[str]:
    """The staged weights that are in nothing that an engine holds, adapters aside."""
    whole = [name for name in held if not is_adapter(name)]
    if not whole:
        return []
    placed = {part for made, *_ in weight_layout(whole, staged).values() for part, *_ in made}
    # An engine hashes a quantised weight as what it stands for, with its scales.
    placed |= {scale_name(name) for name in placed}
    return [name for name in staged if name not in placed and not is_adapter(name)]
