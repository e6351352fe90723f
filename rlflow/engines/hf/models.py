"""A model in memory: its module, its weights by name and version, asleep or awake.

`TorchModel` runs a module on packed tokens; `loading` makes one of a directory. This file
knows neither optimizers nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from rlflow.contract.engines import ModelConfig, Resident
from rlflow.contract.values import Head, Shard, SleepMode
from rlflow.engines.hf.flat import FlatParameters, free, restore, to_host, whole_shards
from rlflow.engines.hf.forward.ahead import SharedRows
from rlflow.engines.hf.forward.attention import AttentionState, attending
from rlflow.engines.hf.forward.head import Predictor, in_place_of_head
from rlflow.engines.hf.layers import HostLayers
from rlflow.engines.hf.layerwise.activations import HostedActivations
from rlflow.engines.hf.lora import Adapters
from rlflow.errors import Finding, RunError, known_names, near_names
from rlflow.modelfiles.heads import Head as StoredHead
from rlflow.modelfiles.pictures.sights import Sight, sight_in
from rlflow.modelfiles.widths import length_finding

Made = TypeVar("Made")

State = Literal["ready", "offloaded", "discarded", "empty"]


class ValueModel(nn.Module):
    """A transformer's body and a head to one number per token.

    The head is a linear layer with a bias, zero at first, or of the form that files have.
    """

    def __init__(self, body: nn.Module, hidden_size: int, head: StoredHead | None = None) -> None:
        super().__init__()
        self.body = body
        self.stored_head = head
        self.value_head = fresh_head(hidden_size) if head is None else head_like(hidden_size, head)

    def forward(self, logits_to_keep: Tensor | int, **inputs: Any) -> SimpleNamespace:
        """Values `[1, kept, 1]` under the name that a language model's logits have."""
        hidden = self.body(**inputs).last_hidden_state
        kept = hidden[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else hidden
        return SimpleNamespace(logits=self.value_head(kept))


def fresh_head(hidden_size: int) -> nn.Module:
    """A linear layer to one number, zero."""
    layer = nn.Linear(hidden_size, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def head_like(hidden_size: int, head: StoredHead) -> nn.Module:
    """A head of the form that files have, to be filled."""
    layers: list[nn.Module] = []
    for size, bias in zip(head.sizes, head.biases, strict=True):
        layers += [nn.Linear(hidden_size, size, bias=bias), nn.ReLU()]
        hidden_size = size
    return layers[0] if len(head.sizes) == 1 else nn.Sequential(*layers[:-1])


class TorchModel(Resident):
    """A module with its weights; `version` counts the updates they have seen.

    With `adapters` they are what training changes, and the other weights are frozen; else it
    changes all but those that are `fixed`. Weights of `layers` live on the host; those are the ones
    that are given and taken by name. A language model has a `predictor` where its head can be
    computed apart from its body, and a mixture of experts the `routers` of its layers. What
    autograd saves of layers may lie on the host as `activations`. The tokens of `shared_rows` lie
    apart on several ranks.
    """

    predictor: Predictor | None = None
    routers: Sequence[nn.Module] = ()
    activations: HostedActivations | None = None
    shared_rows: SharedRows | None = None

    def __init__(
        self,
        module: nn.Module,
        config: ModelConfig,
        *,
        head: Head,
        name: str,
        adapters: Adapters | None = None,
        fixed: frozenset[str] = frozenset(),
        layers: HostLayers | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.head = head
        self.name = name
        self.version = 0
        self.adapters = adapters
        self.fixed = fixed
        self.layers = layers
        resident = names_but(module, () if layers is None else layers.names())
        # What training changes of the weights on the device, and all others there.
        changed = resident - fixed if adapters is None else adapters.names
        self.trained = FlatParameters(module, changed, device)
        self.frozen = FlatParameters(module, resident - self.trained.slots.keys(), device)
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
    def router_places(self) -> Sequence[int]:
        """Where its routers are among those of the whole model."""
        return range(len(self.routers))

    @property
    def routers_now(self) -> Sequence[nn.Module]:
        """The routers that a pass goes through, of the one that is in progress."""
        return self.routers

    @property
    def routers_in_all(self) -> int:
        """How many routers the whole model has."""
        return len(self.routers)

    @cached_property
    def sight(self) -> Sight | None:
        """How it sees pictures; None where it reads text alone."""
        return sight_in(self.config.to_dict(), {})

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
        them. Pictures come with the attention of a packed pass. Raises RunError while the model is
        asleep.
        """
        self.require_ready()
        seen = getattr(attention, "pictures", None)
        turned = None if seen is None else seen.positions
        with attending(attention):
            output = self.module(
                input_ids=tokens[None],
                position_ids=positions[None] if turned is None else turned[:, None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                **({} if seen is None else seen.inputs),
            )
        # An index would copy as much again in the backward; this is a view there as well.
        logits: Tensor = output.logits.squeeze(0)
        return logits

    def predicted(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionState,
        keep: Tensor | None,
        compute: Callable[[Predictor, Tensor], Made],
    ) -> Made:
        """What `compute` makes of the hidden states `[kept, size]` that `logits` predicts from.

        It is called while the head's weights are whole. Only for a model with a `predictor`.
        """
        with in_place_of_head(compute) as made:
            self.logits(tokens, positions, attention, keep)
        return made[0]

    def require_awake(self) -> None:
        """Raise RunError unless the weights have memory on the device."""
        if self.state != "empty":
            self.require_ready()

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

    def require_context(self, longest: int) -> None:
        """Raise RunError for rows that are longer than the context."""
        what = f"a row is longer than the context of model {self.name!r}"
        found = length_finding(what, f"{longest} tokens", longest, 0, self.context or 0)
        if found is not None:
            raise RunError(found)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by name, views of the live storage; tied weights appear once."""
        self.require_ready()
        return self.all_tensors()

    def merged_tensors(self) -> dict[str, Tensor]:
        """The weights by the names of the plain model, adapters added to what they adapt.

        Views of the live storage but for adapted weights, which are new tensors.
        """
        tensors = self.named_tensors()
        return tensors if self.adapters is None else self.adapters.merged(tensors)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Compute the model that adapters started from within the block, in every thread.

        Raises RunError for a model without adapters, whose start is gone.
        """
        if self.adapters is None:
            what = f"model {self.name!r} has no adapters, so there is no base model below it"
            fix = 'rf.Model(..., lora=rf.LoRA(targets=("q_proj", "v_proj")))'
            raise RunError(Finding(code="E516", what=what, fix=fix))
        with self.adapters.off():
            yield

    def all_tensors(self) -> dict[str, Tensor]:
        """The weights by name, whatever the state."""
        hosted = {} if self.layers is None else self.layers.tensors()
        return {**self.frozen.named(), **hosted, **self.trained.named()}

    def shards(self) -> dict[str, Shard]:
        """The weights by name as in `named_tensors`, each whole; usable to fill an empty model.

        Raises RunError while asleep.
        """
        self.require_awake()
        return whole_shards(self.all_tensors())

    def trained_names(self) -> frozenset[str]:
        """The names of the weights that training changes."""
        if self.adapters is not None:
            return self.adapters.names
        hosted = frozenset() if self.layers is None else self.layers.names()
        return hosted.union(self.trained.slots)

    def resting(self, names: Collection[str]) -> dict[str, Shard]:
        """Some weights where they are, on the device or asleep on the host; not to be written.

        A copy on the host never changes: a sleep makes it, and the wake after it reads it and
        lets it go. Raises RunError for weights that were discarded.
        """
        if not names:
            return {}
        if self.state == "offloaded":
            return self.laid_out(self.asleep_tensors(), names)
        self.require_ready()
        return self.laid_out(self.all_tensors(), names)

    def laid_out(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Shard]:
        """Some of tensors that lie as the weights of the same names do."""
        return whole_shards({name: tensor for name, tensor in tensors.items() if name in names})

    def asleep_tensors(self) -> dict[str, Tensor]:
        """The weights by name as they lie on the host while the model is asleep there."""
        copies = dict(zip(map(id, self.buffers()), self._host, strict=True))
        # Layers on the host are written there by whoever averages: no copies that rest.
        hosted = {} if self.layers is None else self.layers.tensors()
        return {name: tensor.clone() for name, tensor in hosted.items()} | {
            name: flat.view(name, copies[id(flat.buffers[slot.dtype])])
            for flat in (self.frozen, self.trained)
            for name, slot in flat.slots.items()
        }

    def loaded(self, version: int) -> None:
        """Take note that every shard was written, with the weights of `version`.

        Raises RunError while asleep.
        """
        self.require_awake()
        self.version = version
        self.state = "ready"

    def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy weights in place and take `version`; nothing changes if a name is wrong.

        All that training changes must be there; frozen weights may be. Raises RunError for a
        missing, unknown or differently shaped tensor, or while asleep.
        """
        self.require_awake()
        mine = self.all_tensors()
        findings = [*misfits(self.name, tensors, mine), *self.missing(tensors)]
        if findings:
            raise RunError(*findings)
        with torch.no_grad():
            for name, tensor in tensors.items():
                mine[name].copy_(tensor)
        self.loaded(version)

    def missing(self, tensors: Mapping[str, Tensor]) -> list[Finding]:
        """One finding for all weights that should have been given."""
        absent = sorted(self.trained_names() - tensors.keys())
        if not absent:
            return []
        what = f"weights for model {self.name!r} are missing: {known_names(absent)}"
        return [Finding(code="E509", what=what)]

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory; `offload` keeps a copy on the host.

        `discard` keeps none of what training changes; frozen weights beside it, which no
        update will bring back, go to the host.
        """
        self.require_ready()
        kept = self.buffers() if mode == "offload" else list(self.frozen.buffers.values())
        self._host = to_host(kept)
        self.state = "offloaded" if mode == "offload" else "discarded"
        free(self.buffers())

    def wake(self) -> None:
        """Take the memory again; after `discard` only new weights make the model whole."""
        if self.state in {"ready", "empty"}:
            return
        restore(self.buffers(), self._host)
        self._host = []
        self.state = "ready" if self.state == "offloaded" else "empty"

    def buffers(self) -> list[Tensor]:
        """The storage of all weights that live on the device, frozen ones first."""
        return [*self.frozen.buffers.values(), *self.trained.buffers.values()]

    def computed_with(self) -> list[Tensor]:
        """What a forward reads on the device, by which it is known whether that has moved."""
        return self.buffers()

    def num_bytes(self) -> int:
        """Bytes of all weights, wherever they are."""
        hosted = 0 if self.layers is None else self.layers.num_bytes()
        return hosted + self.frozen.num_bytes() + self.trained.num_bytes()


def names_but(module: nn.Module, others: Container[str]) -> set[str]:
    """The names of a module's parameters that are not among `others`."""
    return {name for name, _ in module.named_parameters() if name not in others}


def misfits(name: str, tensors: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> list[Finding]:
    """What is wrong with weights that were given."""
    findings = []
    for key, tensor in tensors.items():
        if key not in mine:
            what = f"model {name!r} has no weight {key!r}"
            findings.append(Finding(code="E509", what=what, near=near_names(key, mine)))
        elif tensor.shape != mine[key].shape:
            findings.append(
                Finding(
                    code="E509",
                    what=f"weight {key!r} of model {name!r} has another shape",
                    got=str(tuple(tensor.shape)),
                    expected=str(tuple(mine[key].shape)),
                )
            )
    return findings
