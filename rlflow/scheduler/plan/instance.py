"""Model instances and the memory they hold: what is loaded where, and what of it can sleep.

Frozen data of a plan; nothing here knows actions, time or bytes of a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlflow.graph.op import Use
from rlflow.graph.placement import Offload
from rlflow.graph.user.engine_options import EngineOptions
from rlflow.scheduler.plan.engine_plan import EnginePlan

MICRO_TOKENS = 32_768
# Metrics of a rollout: bytes that its engine kept of each device when it slept last, tokens of
# its pool, seconds that it took to start.
ASLEEP, POOLED, STARTED = "asleep_bytes", "pool_tokens", "start_seconds"
PartKind = Literal["weights", "gradients", "optimizer", "cache", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of memory that can sleep: an instance's weights, gradients or optimizer state.

    `size` is bytes on each of `devices`; None where the model's files are not here. `residual`
    of them stay on the device while it sleeps. Gradients never outlive an update, so they are
    only ever discarded. The `cache` that a rollout in pieces keeps from one to the next stays.
    An engine in a process of its own keeps keys and values in a `pool`: of no use between two
    rollouts, so it is only ever discarded too. For an engine's weights `on_host` bytes of each
    device's host are taken all the time: by a copy, which is what an offload leaves, and on a
    CPU by the engine's process; of some devices so many `more_on_host`. On the devices where
    everything fits it `stays`. `holds` says what `size` is of, where that is several things, each
    with its bytes.
    """

    name: str
    instance: str
    kind: PartKind
    size: int | None
    devices: tuple[int, ...]
    residual: int = 0
    on_host: int = 0
    more_on_host: tuple[tuple[int, int], ...] = ()
    stays: tuple[int, ...] = ()
    holds: tuple[tuple[str, int], ...] = ()

    @property
    def leaves(self) -> tuple[int, ...]:
        """The devices on which it sleeps where it has to."""
        return tuple(device for device in self.devices if device not in self.stays)

    def as_json(self) -> dict[str, Any]:
        """As plain data; without `on_host` and what follows it where they are nothing."""
        rare = {"on_host", "more_on_host", "stays", "holds"}
        return {k: v for k, v in asdict(self).items() if v or k not in rare}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A model loaded on a pool: its layout and the uses it serves; one of them is trained.

    Its ranks are a mesh (replicas, fsdp, tp), row-major over `devices`: the last `tp` of
    them share each layer, and so the rows. One pass sees at most `micro_tokens` tokens, or one
    row. The layers of a frozen model, or the optimizer's state of a trained one, may be what it
    has to `offload`: they stay in host memory, and visit the devices. With `options` it is an
    engine in a process of its own for each replica, which the replica's first device owns: there
    lie the rows, and there weights arrive whole. In such an engine the model `drafter` may propose
    `draft_tokens` tokens at a time; it is an instance of its own `inside` that of the engine,
    whose weights it sleeps and wakes with.
    """

    name: str
    model: str
    pool: str
    devices: tuple[int, ...]
    uses: tuple[Use, ...]
    trained: bool
    fsdp: int = 1
    tp: int = 1
    recompute: bool = False
    offload: Offload | None = None
    micro_tokens: int = MICRO_TOKENS
    options: EngineOptions | None = None
    drafter: str | None = None
    draft_tokens: int = 0
    inside: str | None = None
    engine_plan: EnginePlan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        said = {"options": self.options, "drafter": self.drafter, "inside": self.inside}
        made = EnginePlan(**said, draft_tokens=self.draft_tokens)  # type: ignore[arg-type]
        object.__setattr__(self, "engine_plan", made)

    @property
    def engine(self) -> str:
        """What it generates with."""
        return self.engine_plan.name

    @property
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each tensor-parallel group: those that share each layer, and the rows.

        Of an engine in processes of its own a replica each.
        """
        starts = range(0, len(self.devices), self.tp)
        return tuple(self.devices[start : start + self.tp] for start in starts)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each process that computes with it: of an engine's a replica's."""
        return (
            self.tp_groups
            if self.engine_plan.in_process
            else tuple((device,) for device in self.devices)
        )

    @property
    def owners(self) -> tuple[int, ...]:
        """The devices whose processes hold anything of it."""
        return tuple(devices[0] for devices in self.processes)

    @property
    def row_parts(self) -> int:
        """Ranks that see different rows: all but those that share each layer."""
        return len(self.devices) // self.tp

    @property
    def replicas(self) -> int:
        """Copies of the whole model over the pool's devices."""
        return len(self.devices) // (self.fsdp * self.tp)

    @property
    def weights(self) -> str:
        """The name of the part that holds the parameters."""
        return f"{self.name}/weights"

    @property
    def gradients(self) -> str:
        """The name of the part that holds the gradients while it is trained."""
        return f"{self.name}/gradients"

    @property
    def optimizer(self) -> str:
        """The name of the part that holds the optimizer's moments."""
        return f"{self.name}/optimizer"

    @property
    def pool_part(self) -> str:
        """The name of the part that holds an engine's keys and values."""
        return f"{self.name}/pool"

    @property
    def serving(self) -> tuple[str, ...]:
        """The names of the parts that it generates or scores with."""
        own = self.engine_plan.own_process
        return (self.weights, self.pool_part) if own else (self.weights,)

    @property
    def sharded(self) -> bool:
        """Whether its ranks compute together; otherwise each has a replica of its own."""
        if self.engine_plan.in_process:
            return False
        return len(self.devices) > 1 and (self.trained or self.fsdp * self.tp > 1)

    def layout(self) -> str:
        """The printed layout."""
        parts = [f"fsdp={self.fsdp}"] if self.fsdp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += [f"x{self.replicas}"] if self.replicas > 1 else []
        parts = parts or ["whole"]
        parts += self.engine_plan.told()
        parts += ["recompute"] if self.recompute else []
        parts += [f"offload={self.offload}"] if self.offload else []
        parts += [f"micro={self.micro_tokens}"] if self.micro_tokens != MICRO_TOKENS else []
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Plain data; without keys for an engine or a drafter where it has none."""
        found = asdict(self)
        for name in ("drafter", "draft_tokens", "inside"):
            if not found[name]:
                del found[name]
        del found["engine_plan"], found["options"]
        if self.engine_plan.own_process:
            found["options"] = self.engine_plan.settings.as_json()
        return found


def engines_of(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Of some instances those that are engines in processes of their own."""
    return tuple(each for each in instances if each.engine_plan.own_process)


def told_options(instance: Instance, **said: object) -> Instance:
    """An engine whose options say more."""
    return replace(instance, options=instance.engine_plan.settings.model_copy(update=said))
