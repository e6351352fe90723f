"""Generation by the ranks that share each layer: they draw together, the first of them decides.

This file knows neither how layers are shared nor rewards and updates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.contract.pictures import Pictures
from rlflow.contract.values import Generation, Reach, SampleKey, Sampling
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.speculative import Draft
from rlflow.engines.hf.rollout import EVERYTHING, TorchRollout
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.modelfiles.paging import MOST_ROWS


class AgreedResponses(Responses):
    """Rows as they grow, equal on all ranks that share each layer."""

    def __init__(
        self,
        rollout: ShardedRollout,
        sampling: Sampling,
        key: SampleKey,
        ids: Tensor,
        reach: Reach,
    ) -> None:
        super().__init__(sampling, key, ids, reach, rollout.model.device)
        self.rollout = rollout

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """What the first rank has drawn; with it comes whether it was told to stop."""
        tokens, log_probs = super().choose(logits, uniform)
        told = tokens.new_full((1,), self.rollout.told_to_stop())
        said = self.first_says(torch.cat([tokens.double(), log_probs.double(), told.double()]))
        self.heard(bool(said[-1]))
        tokens, log_probs = said[:-1].view(2, -1)
        return tokens.long(), log_probs.float()

    def agreed(self, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """What the first rank has drawn."""
        said = self.first_says(torch.stack([tokens.double(), log_probs.double()]))
        return said[0].long(), said[1].float()

    def stop_said(self) -> Tensor | None:
        """Whether the first rank was told to stop."""
        return self.first_says(self.live.new_full((1,), self.rollout.told_to_stop()))

    def heard(self, stop: bool) -> None:
        """Ranks end a generation after the same token."""
        self.rollout.ended = stop

    def first_says(self, values: Tensor) -> Tensor:
        """Those of the first of the ranks that share each layer, in place."""
        return self.rollout.model.ranks.first_says(values, "tp")


class ShardedRollout(TorchRollout):
    """Generates with the ranks that share each layer of `model`, which all get the same prompts.

    All ranks of the mesh call `generate` equally often. Ranks along `fsdp` first gather the
    parameters of their layers, whole, and then generate each by themselves. On a pool of blocks
    the first rank's draws reach the others within a step, and that it was told to stop with what
    the host reads of a window of steps.
    """

    def __init__(
        self, model: ShardedModel, *, paged: bool | None = None, rows_at_once: int = MOST_ROWS
    ) -> None:
        super().__init__(model, paged=paged, rows_at_once=rows_at_once)
        self.model: ShardedModel = model
        self.ended = False

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach = EVERYTHING,
        draft: Draft | None = None,
        *,
        pictures: Pictures | None = None,
    ) -> Generation:
        """See `TorchRollout.generate`; every rank of a row part returns the same."""
        self.model.require_ready()
        with self.model.gathered():
            return super().generate(
                prompts, sampling, key, sample_ids, reach, draft, pictures=pictures
            )

    def responses(
        self, sampling: Sampling, key: SampleKey, sample_ids: Tensor, reach: Reach
    ) -> Responses:
        """Rows without tokens, on which the ranks agree."""
        self.ended = False
        return AgreedResponses(self, sampling, key, sample_ids, reach)

    def told_to_stop(self) -> bool:
        """Whether `abort` was called in this process."""
        return super().stopped()

    def stopped(self) -> bool:
        """Whether it was called in that of the first rank, when the last token was drawn."""
        return self.ended
