"""The weights of a drafter that lies in an engine, beside those of the engine's model.

What a reshard writes is the staging of them, which can be written while the engine sleeps: the
drafter sleeps and wakes with the engine's weights, and is filled from the staging after each wake
and in every new engine. This file knows neither rows nor how processes start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.contract.engines import ModelConfig, Resident
from rlflow.contract.values import Drafting, Shard, SleepMode
from rlflow.engines.hf.flat import whole_shards
from rlflow.engines.process.client.shared_weights import SharedWeights

DRAFT = "draft"


class EngineDraft(Resident):
    """A drafter in an engine; `loaded` brings its staging there.

    `bring` does so, `compare` compares the staging with what is there: both are the engine's.
    """

    # It sleeps and wakes with the engine.
    state = "ready"

    def __init__(self, said: Drafting, staging: SharedWeights, config: ModelConfig) -> None:
        self.name = said.name
        self.tokens = said.tokens
        self.config = config
        self.context = context_of(config)
        self.device = torch.device("cpu")
        self.staging = staging
        self.version = 0
        self.bring: Callable[[], object] = bool
        self.compare: Callable[[], dict[str, tuple[str, str]]] = dict

    def shards(self) -> dict[str, Shard]:
        """The weights by their Hugging Face names, each whole; views of the staging."""
        return whole_shards(self.staging.tensors)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by name as they were last loaded; views of the staging."""
        return dict(self.staging.tensors)

    def trained_names(self) -> frozenset[str]:
        """The names of all weights: a reshard brings every one."""
        return frozenset(self.staging.tensors)

    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.staging.tensors.values())

    def loaded(self, version: int) -> None:
        """Bring what was written to the staging, the weights of `version`, to the engine.

        An engine that sleeps gets them when it wakes. Raises RunError where it refuses them.
        """
        self.version = version
        self.bring()

    def require_ready(self) -> None:
        """The staging is always there."""

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Nothing: it sleeps with the engine."""

    def wake(self) -> None:
        """Nothing: it wakes with the engine."""

    def check(self) -> dict[str, tuple[str, str]]:
        """The weights whose hashes differ, by the engine's names: (staging, engine).

        None where the engine sleeps and holds no weights.
        """
        return self.compare()


def context_of(config: ModelConfig) -> int | None:
    """The context of a model, as its config says."""
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found
