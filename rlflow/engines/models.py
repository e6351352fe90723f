"""A model in memory: its module, its weights by name and version, asleep or awake.

`TorchModel` runs a module on packed tokens; `loading` makes one of a directory. This file
knows neither optimizers nor sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlflow.engines.attention import AttentionState, attending
from rlflow.engines.flat import FlatParameters, free, restore, to_host
from rlflow.engines.protocol import Head, SleepMode
from rlflow.errors import Finding, RunError, known_names, near_names

State = Literal["ready", "offloaded", "discarded", "empty"]


class ValueModel(nn.Module):
    """A transformer's body and a linear layer to one number per token, zero at first."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.value_head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, logits_to_keep: Tensor | int, **inputs: Any) -> SimpleNamespace:
        """Values `[1, kept, 1]` under the name that a language model's logits have."""
        hidden = self.body(**inputs).last_hidden_state
        kept = hidden[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else hidden
        return SimpleNamespace(logits=self.value_head(kept))


class TorchModel:
    """A module with its weights; `version` counts the updates they have seen."""

    def __init__(self, module: nn.Module, config: Any, *, head: Head, name: str) -> None:
        self.module = module
        self.config = config
        self.head = head
        self.name = name
        self.version = 0
        self.flat = FlatParameters(module)
        self.state: State = "ready"
        self._host: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """Where the weights live when awake."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.module.parameters()).dtype

    @property
    def context(self) -> int | None:
        """How many tokens a row may have, None where the model sets no limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def logits(
        self, tokens: Tensor, positions: Tensor, attention: AttentionState, keep: Tensor | None
    ) -> Tensor:
        """Run flat `tokens [total]`; logits `[kept, vocabulary]`, or values `[kept, 1]`.

        `keep` int64 `[kept]` names the flat tokens whose predictions are wanted, None all of
        them. Raises RunError while the model is asleep.
        """
        self.require_ready()
        with attending(attention):
            output = self.module(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            )
        logits: Tensor = output.logits[0]
        return logits

    def require_ready(self) -> None:
        """Raise RunError unless the weights are on the device and whole."""
        if self.state == "ready":
            return
        causes = {
            "offloaded": ("asleep", "wake it first"),
            "discarded": ("asleep and its weights were discarded", "wake it, then load weights"),
            "empty": ("awake but has no weights since they were discarded", "load weights first"),
        }
        cause, fix = causes[self.state]
        raise RunError(Finding(code="E506", what=f"model {self.name!r} is {cause}", fix=fix))

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by name, views of the live storage; tied weights appear once."""
        self.require_ready()
        return self.flat.named()

    def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy all weights in place and take `version`; nothing changes if a name is wrong.

        Raises RunError for a missing, unknown or differently shaped tensor, or while asleep.
        """
        if self.state != "empty":
            self.require_ready()
        mine = self.flat.named()
        findings = [*self.unknown(tensors, mine), *self.missing(tensors, mine)]
        if findings:
            raise RunError(*findings)
        with torch.no_grad():
            for name, target in mine.items():
                target.copy_(tensors[name])
        self.version = version
        self.state = "ready"

    def unknown(self, tensors: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> list[Finding]:
        """What is wrong with the tensors that were given."""
        findings = []
        for name, tensor in tensors.items():
            if name not in mine:
                what = f"model {self.name!r} has no weight {name!r}"
                findings.append(Finding(code="E509", what=what, near=near_names(name, mine)))
            elif tensor.shape != mine[name].shape:
                findings.append(
                    Finding(
                        code="E509",
                        what=f"weight {name!r} of model {self.name!r} has another shape",
                        got=str(tuple(tensor.shape)),
                        expected=str(tuple(mine[name].shape)),
                    )
                )
        return findings

    def missing(self, tensors: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> list[Finding]:
        """One finding for all weights that were not given."""
        absent = [name for name in mine if name not in tensors]
        if not absent:
            return []
        what = f"weights for model {self.name!r} are missing: {known_names(absent)}"
        return [Finding(code="E509", what=what)]

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory; `offload` keeps a copy on the host, `discard` nothing."""
        self.require_ready()
        buffers = self.flat.buffers.values()
        if mode == "offload":
            self._host = to_host(buffers)
            self.state = "offloaded"
        else:
            self.state = "discarded"
        free(buffers)

    def wake(self) -> None:
        """Take the memory again; after `discard` only `load_tensors` makes the model whole."""
        if self.state in {"ready", "empty"}:
            return
        restore(self.flat.buffers.values(), self._host)
        self._host = []
        self.state = "ready" if self.state == "offloaded" else "empty"

    def num_bytes(self) -> int:
        """Bytes of the weights when awake."""
        return self.flat.num_bytes()
