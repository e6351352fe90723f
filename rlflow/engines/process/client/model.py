"""A model whose weights an engine holds; what a reshard writes is the staging of them.

The staging is the host's copy: it stays while the engine sleeps, and fills a new engine after a
loss. This file knows neither rows nor how processes start.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Shard, SleepMode
from rlflow.engines.hf.flat import whole_shards
from rlflow.engines.hf.models import State, misfits
from rlflow.engines.process.client.draft import DRAFT, EngineDraft
from rlflow.engines.process.client.link import Link, LostError, RefusedError
from rlflow.engines.process.client.replica import Launch, Replica
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.taking import BucketTaker
from rlflow.engines.process.client.updates import InMemory, Update, Way
from rlflow.engines.process.client.weight_check import Ask, hash_differences
from rlflow.engines.reshard.quantised import in_blocks
from rlflow.errors import Finding, RunError, known_names

WEIGHTS, POOL = "weights", "kv_cache"


class EngineModel:
    """The weights of an engine by name and version, asleep or awake, and its pool.

    `shards` are the staging; `loaded` brings it to the engine: all of it, or the `trained` weights
    alone, adapters, where the others are there. With `blocks` it holds linear layers in float8, as
    the staging does. A `draft` lies in it too, and sleeps and wakes
    with the weights. `close` ends the engine; it is called when the model is forgotten, and the
    engine dies with this process in any case.
    """

    def __init__(
        self,
        launch: Launch,
        staging: SharedWeights,
        config: ModelConfig,
        *,
        context: int | None,
        dtype: torch.dtype,
        draft: EngineDraft | None = None,
        trained: frozenset[str] | None = None,
        way: Way | None = None,
        blocks: bool = False,
    ) -> None:
        self.way = way or InMemory()
        self.name = launch.name
        self.config = config
        self.context = context
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.version = 0
        self.state: State = "ready"
        self.pool_awake = True
        self.staging = staging
        self._taker: BucketTaker | None = None
        self._trained = trained
        self._blocks = blocks
        self.draft = draft
        if draft is not None:
            draft.bring = weakly(self._bring_draft)
            draft.compare = weakly(self._compare_draft, otherwise={})
        self._seconds: dict[str, float] = {}
        self._residual: dict[str, float] = {}
        self.replica = Replica(
            launch, restored=weakly(self._restored), wanted=weakly(self._wanted, otherwise=False)
        )
        self.close = weakref.finalize(self, self.replica.close)
        self.replica.link()

    def shards(self) -> dict[str, Shard]:
        """The weights by their Hugging Face names, each whole; views of the staging.

        Raises RunError while asleep.
        """
        self.require_awake()
        return whole_shards(self.staging.tensors)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by name as they were last loaded; views of the staging."""
        self.require_ready()
        return dict(self.staging.tensors)

    def trained_names(self) -> frozenset[str]:
        """The names of what a reshard brings: of all weights, or of adapters."""
        return frozenset(self.staging.tensors) if self._trained is None else self._trained

    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.staging.tensors.values())

    def require_awake(self) -> None:
        """Raise RunError unless the weights have memory on the device."""
        if self.state not in {"ready", "empty"}:
            what = f"model {self.name!r} is asleep"
            raise RunError(Finding(code="E506", what=what, fix="wake it first"))

    def require_ready(self) -> None:
        """Raise RunError unless the engine can generate: weights whole, pool awake."""
        self.require_awake()
        if self.state == "empty":
            what = f"model {self.name!r} is awake but has no weights since they were discarded"
            raise RunError(Finding(code="E506", what=what, fix="load weights first"))
        if not self.pool_awake:
            what = f"the pool of keys and values of {self.name!r} is asleep"
            raise RunError(Finding(code="E585", what=what, fix="wake the pool first"))

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory of the weights; the staging is what `offload` keeps.

        After `discard` only new weights make the model whole.
        """
        self.require_awake()
        self.state = "offloaded" if mode == "offload" else "discarded"
        self._sleep(WEIGHTS)

    def wake(self) -> None:
        """Take the memory of the weights again; after `offload` fill it from the staging."""
        if self.state in {"ready", "empty"}:
            return
        fill = self.state == "offloaded"
        self.state = "ready" if fill else "empty"
        self._wake(WEIGHTS)
        self._bring_draft()
        if fill:
            self._update()

    def sleep_pool(self) -> None:
        """Free the device memory of the pool, and with it what it has cached."""
        if self.pool_awake:
            self.pool_awake = False
            self._sleep(POOL)

    def wake_pool(self) -> None:
        """Take the memory of the pool again, empty."""
        if not self.pool_awake:
            self.pool_awake = True
            self._wake(POOL)

    def loaded(self, version: int) -> None:
        """Bring what was written to the staging, the weights of `version`, to the engine.

        Waits for requests in flight and empties the cache. Raises RunError while asleep, and
        where the engine refuses the weights.
        """
        self.require_awake()
        self.version = version
        self.state = "ready"
        self._update()

    def taker(self) -> BucketTaker:
        """What takes the next update in buckets, until `loaded` tells its version.

        Raises RunError while asleep.
        """
        self.require_awake()
        if self._taker is None:
            self._taker = BucketTaker(self.staging, self.replica.link)
        return self._taker

    def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy weights to the staging and load them; nothing changes if a name is wrong.

        All that a reshard brings must be there; weights below adapters may be. Weights are given
        in full, also to an engine that holds them in blocks. Raises RunError for a missing, unknown
        or differently shaped tensor, or while asleep.
        """
        self.require_awake()
        tensors = in_blocks(tensors) if self._blocks else tensors
        mine, trained = self.staging.tensors, self.trained_names()
        findings = [*misfits(self.name, tensors, mine), *_missing(self.name, tensors, trained)]
        if findings:
            raise RunError(*findings)
        with torch.no_grad():
            for name, tensor in tensors.items():
                mine[name].copy_(tensor)
        self.version, self.state = version, "ready"
        self._update(whole=tensors.keys() > trained)

    def checksums(self) -> list[dict[str, str]]:
        """Hashes of what the engine holds, by its own names, of every rank of it."""
        self.require_awake()
        found: list[dict[str, str]] = self._asked("checksums", {})
        return found

    def check(self) -> dict[str, tuple[str, str]]:
        """The weights whose hashes differ, by the engine's names: (staging, engine).

        With several ranks a name has the number of its rank behind it. Of adapters what the
        engine was sent last is compared, which is whole.
        """
        return self._compared(self.staging.stored, {}, self.config)

    def measured(self) -> dict[str, float]:
        """Seconds of the last start, sleep, wake and update; starts; tokens of the pool.

        `residual_bytes` is what the engine's processes held when both parts last slept: device
        memory, or memory of the host where the device is a CPU, whose weights and pool stay. It
        is of `ranks_here`: all ranks, or those on this host.
        """
        return {
            "ranks_here": float(self.replica.launch.ranks),
            "start_seconds": self.replica.seconds,
            "starts": float(self.replica.starts),
            "ports_taken": float(self.replica.taken),
            "pool_tokens": float(self.replica.facts["pool_tokens"]),
            **self._residual,
            **self._seconds,
        }

    def refused(self, what: str, error: Exception) -> RunError:
        """What to raise where the engine did not do what was asked."""
        text = f"the engine of {self.name!r} did not {what}"
        return RunError(Finding(code="E587", what=text, got=str(error).strip()))

    def _compare_draft(self) -> dict[str, tuple[str, str]]:
        """The same of the drafter's weights; nothing while those sleep."""
        assert self.draft is not None
        if not self._wanted():
            return {}
        return self._compared(self.draft.staging.stored, {"of": DRAFT}, self.draft.config)

    def _compared(
        self, staged: Mapping[str, Tensor], of: Mapping[str, str], config: ModelConfig
    ) -> dict[str, tuple[str, str]]:
        """The weights whose hashes differ from those that are staged, of every rank."""
        self.require_awake()
        return self._differing(self._asked, staged, of, config)

    def _differing(
        self, ask: Ask, staged: Mapping[str, Tensor], of: Mapping[str, str], config: ModelConfig
    ) -> dict[str, tuple[str, str]]:
        heads = key_value_heads(config)
        return hash_differences(ask, staged, of, cuda=self.replica.launch.cuda, kv_heads=heads)

    def _bring_draft(self) -> None:
        """Bring the drafter's staging to the engine, unless there is none or it sleeps.

        A replacement has it before it can be had.
        """
        if self.draft is None or not self._wanted():
            return
        try:
            self.replica.link().ask("update", self._draft_fields()).result()
        except LostError:
            self.replica.link()
        except RefusedError as error:
            raise self.refused("take weights of its drafter", error) from error

    def _draft_fields(self) -> dict[str, Any]:
        """What is asked to bring the drafter's staging to the engine."""
        assert self.draft is not None
        return {"version": self.draft.version, "of": DRAFT}

    def _asked(self, do: str, fields: Mapping[str, Any]) -> Any:
        """The answer to a question, asked again of another engine where one is lost."""
        reason = ""
        for _ in range(2):
            try:
                return self.replica.link().ask(do, fields).result()
            except LostError as error:
                reason = str(error)
            except RefusedError as error:
                raise self.refused(f"answer ({do})", error) from error
        raise self.replica.lost(reason)

    def _update(self, *, whole: bool = False) -> None:
        """Have the engine load the staging; the `whole` of it where adapters are not all."""
        began = time.monotonic()
        try:
            told = self._ended() or self._bring(self.replica.link(), whole=whole)
        except LostError:
            # Its replacement is filled from the staging before it can be had.
            self.replica.link()
            told = str(self.version)
        except RefusedError as error:
            raise self.refused(f"take weights of version {self.version}", error) from error
        if told != str(self.version):
            raise RunError(
                Finding(
                    code="E586",
                    what=f"the engine of {self.name!r} has other weights than it was given",
                    got=f"version {told}",
                    expected=f"version {self.version}",
                )
            )
        self._seconds["update_seconds"] = time.monotonic() - began

    def _ended(self) -> str:
        """End an update that the engine has taken in buckets, and tell its version; "" if none."""
        if self._taker is None or not self._taker.begun:
            return ""
        return self._taker.shut(self.version)

    def _bring(self, link: Link, *, whole: bool = False) -> str:
        """Bring the staging to an engine; the version that it then reports.

        Raises RefusedError where the engine says that it has the weights, and a rank of it differs.
        """

        def prove() -> None:
            def ask(do: str, fields: Mapping[str, Any]) -> Any:
                return link.ask(do, fields).result()

            wrong = self._differing(ask, self.staging.stored, {}, self.config)
            if wrong:
                raise RefusedError(f"other weights are there: {known_names(sorted(wrong))}")

        facts = self.replica.facts
        return self.way.bring(
            Update(link=link, version=self.version, facts=facts, prove=prove, whole=whole)
        )

    def _sleep(self, tag: str) -> None:
        """Put a part to sleep; an engine that is lost meanwhile holds no memory either."""
        began = time.monotonic()
        link = self.replica.present()
        try:
            if link is not None:
                link.ask("sleep", {"tags": [tag]}).result()
        except LostError:
            pass
        except RefusedError as error:
            raise self.refused(f"sleep ({tag})", error) from error
        self._seconds[f"sleep_{tag}_seconds"] = time.monotonic() - began
        if not self.pool_awake and not self._wanted():
            held = self.replica.held_bytes()
            self._residual = {} if held is None else {"residual_bytes": float(held)}

    def _wake(self, tag: str) -> None:
        """Wake a part; of an engine that was lost meanwhile, a new one has it."""
        began = time.monotonic()
        self.replica.look_again()
        try:
            self.replica.link().ask("wake", {"tags": [tag]}).result()
        except LostError:
            self.replica.link()
        except RefusedError as error:
            raise self.refused(f"wake ({tag})", error) from error
        self._seconds[f"wake_{tag}_seconds"] = time.monotonic() - began

    def _wanted(self) -> bool:
        """Whether a new engine may take memory: the weights are awake."""
        return self.state in {"ready", "empty"}

    def _restored(self, link: Link) -> None:
        """Bring a new engine to where the model and its drafter are."""
        if self.draft is not None:
            link.ask("update", self._draft_fields()).result()
        if self.state == "ready":
            self._bring(link)
        if not self.pool_awake:
            link.ask("sleep", {"tags": [POOL]}).result()


def token_cache_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, over all layers and ranks."""
    text, heads = config.get_text_config(), key_value_heads(config) or 0
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * dtype.itemsize)


def key_value_heads(config: ModelConfig) -> int | None:
    """The key-value heads of a model; None of one without attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    return heads or getattr(text, "num_attention_heads", None)


def weakly(method: Callable[..., Any], *, otherwise: Any = None) -> Callable[..., Any]:
    """A method that does not keep its object; `otherwise` once that is gone."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return otherwise if found is None else found(*args)

    return call


def _missing(name: str, tensors: Mapping[str, Tensor], wanted: Set[str]) -> list[Finding]:
    """One finding for all weights that should have been given."""
    absent = sorted(wanted - tensors.keys())
    if not absent:
        return []
    return [Finding(code="E509", what=f"weights for {name!r} are missing: {known_names(absent)}")]
