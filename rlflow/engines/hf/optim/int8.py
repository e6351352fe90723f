"""AdamW with both moments of matrices in 8 bits.

Dettmers et al., "8-bit optimizers via block-wise quantization" (arXiv:2110.02861). Moments are made
wide, stepped as ever and coded again, a piece at a time; a first moment has signs, a second none.
This file knows no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.engines.hf.optim.adamw import MOMENTS
from rlflow.engines.hf.optim.coded import SCALES, CodedGroup, Recoded
from rlflow.engines.hf.optim.grouped import Group, GroupedState, StateShapes
from rlflow.modelfiles.coded import block_of

SIGNED = dict(zip(MOMENTS, (True, False), strict=True))


class Int8AdamWState(GroupedState):
    """The optimizer of one model: gradients, codes and scales of moments, the count of steps."""

    def grouped(self, wanted: StateShapes) -> list[Group]:
        """Matrices in 8 bits, smaller ones, and vectors."""
        of_all = {name: self.block(name, wanted.whole[name]) for name in wanted.shapes}
        blocks = {name: block for name, block in of_all.items() if block}
        rest = wanted.only(of_all.keys() - blocks).wide()
        if not blocks:
            return rest
        own = CodedGroup(
            wanted.only(blocks).shapes,
            blocks,
            SIGNED,
            wanted.beside,
            wanted.dtype,
            wanted.device,
            on_host=wanted.on_host,
        )
        return [own, *rest]

    def block(self, name: str, shape: Sequence[int]) -> int:
        """Numbers of a row of a parameter with one scale; 0 where its moments stay wide."""
        return block_of(shape)

    @property
    def blocks(self) -> dict[str, int]:
        """The same of all parameters in 8 bits."""
        coded = [group for group in self.groups if isinstance(group, CodedGroup)]
        return {name: block for group in coded for name, block in group.blocks.items()}

    def fitted(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Coded anew where the blocks on disk are of another size, as ranks along `tp` cut rows."""
        found = dict(stored)
        for name, block in self.blocks.items():
            for kind, signed in SIGNED.items():
                keys = f"{kind}.{name}", f"{kind}{SCALES}.{name}"
                if not set(keys) <= stored.keys():
                    continue
                pair = stored[keys[0]], stored[keys[1]]
                if pair[1].get_shape()[-1] * block == pair[0].get_shape()[-1]:
                    continue
                for key, scales in zip(keys, (False, True), strict=True):
                    found[key] = Recoded(pair, block, scales=scales, signed=signed)
        return found
