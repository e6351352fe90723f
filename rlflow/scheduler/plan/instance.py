"""Model instances and the memory they hold: what is loaded where, and what of it can sleep.

Frozen data of a plan; nothing here knows actions, time or bytes of a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from rlflow.graph.op import Use
from rlflow.graph.placement import ContextBy, Recompute, Schedule
from rlflow.graph.user.engine_options import EngineOptions
from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.scheduler.plan.engine_plan import EnginePlan

MICRO_TOKENS = 32_768
# Metrics of a rollout: bytes that its engine kept of each device when it slept last, tokens of
# its pool, seconds that it took to start.
ASLEEP, POOLED, STARTED = "asleep_bytes", "pool_tokens", "start_seconds"
PartKind = Literal["weights", "gradients", "optimizer", "activations", "cache", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of memory that can sleep: an instance's weights, gradients or optimizer state.

    `size` is bytes on each of `devices`; None where the model's files are not on this machine.
    `residual` bytes stay on the device while the part sleeps; on the devices in `stays` it never
    sleeps, since everything fits there. Gradients are only ever discarded, since no update needs
    those of another. The part of `activations` that go to the host and come back is what they have
    there; on devices it has nothing. The `cache` of a rollout in pieces stays from one piece to the
    next. The `pool` of an engine in a process of its own has keys and values; it is of no use
    between two rollouts, and is only ever discarded. The weights of such an engine take `on_host`
    bytes on the host of each device at all times: for the copy that an offload leaves, and on a CPU
    for the engine's process. `more_on_host` adds to that for single devices. `holds` lists what
    `size` is made of where that is several things, each with its bytes.
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
        if not self.stays:
            return self.devices
        return tuple(device for device in self.devices if device not in self.stays)

    def as_json(self) -> dict[str, Any]:
        """As plain data; `on_host`, `more_on_host`, `stays` and `holds` only where they are set."""
        rare = {"on_host", "more_on_host", "stays", "holds"}
        return {k: v for k, v in asdict(self).items() if v or k not in rare}


@lru_cache(maxsize=1024)
def _runs(counts: tuple[int, ...], pp: int) -> tuple[tuple[range, ...], ...]:
    starts = itertools.accumulate(counts, initial=0)
    every = [range(*each) for each in itertools.pairwise(starts)]
    return tuple(tuple(every[place::pp]) for place in range(pp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A model loaded on a pool: its layout and its uses. One instance of a model may be trained.

    Its ranks are a mesh (replicas, pp, fsdp, cp, tp), row-major over `devices`. Ranks along `tp`
    share each layer, and therefore the rows, of which ranks along `cp` have a part of the tokens
    each, and attend `cp_by` heads or a ring. Those along pp see the same rows. Of `stages` of so
    many layers each has every pp-th one, `virtual` of them, and updates go by a `schedule`. Those
    along fsdp and cp share every parameter; each `ep` neighbours hold different experts. So many
    parameters are `seeing`, of a vision tower and of its projector: every rank along tp of the
    first stage has those of all.
    A rank sees at most `micro_tokens` tokens in a pass, or its part of one row.
    An update's backward computes layers again that `recompute` names, or the `recompute_first`.
    Layers gathered for an update's forward are `kept_whole` until its backward, or gathered again.
    Its gradients are summed over `fsdp` in every micro-batch, or whole until it `reduces_last`.
    Ranks along `tp` that share the `sequence` have a part of the tokens each between its blocks.
    `offload` names what stays in host memory and visits the devices: the layers of a frozen model,
    or the optimizer's state of a trained one. That one `hosts_activations` there as well, from the
    forward of an update to its backward. Layers are `compiled` for updates and log-probs, or run as
    they are. Uses in `tf32` multiply float32 numbers by TensorFloat-32. A pool of blocks has slots
    for `rows_at_once` rows of a rollout; the others wait, and a prompt's begin together. With
    `options` every replica is an engine in a process of its own. The first device of a replica owns
    that process: rows lie there, and weights arrive there whole. In such an engine the model
    `drafter` may propose `draft_tokens` tokens at a time. The drafter is an instance of its own,
    `inside` that of the engine, and sleeps and wakes with the engine's weights.
    """

    name: str
    model: str
    pool: str
    devices: tuple[int, ...]
    uses: tuple[Use, ...]
    trained: bool
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    cp_by: ContextBy | None = None
    pp: int = 1
    virtual: int = 1
    schedule: Schedule = "1f1b"
    stages: tuple[int, ...] = ()
    seeing: tuple[int, ...] = ()
    recompute: bool | Literal["selective"] = False
    recompute_first: int | None = None
    kept_whole: bool = False
    reduces_last: bool = False
    sequence: bool = False
    offload: Literal["layers", "optimizer"] | None = None
    hosts_activations: bool = False
    compiled: bool = False
    tf32: tuple[Use, ...] = ()
    micro_tokens: int = MICRO_TOKENS
    rows_at_once: int = MOST_ROWS
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
    def recomputes(self) -> Recompute:
        """Which layers' activations a backward computes again, as a placement says it."""
        return self.recompute_first or self.recompute

    @property
    def engine(self) -> str:
        """What it generates with."""
        return self.engine_plan.name

    @property
    def shards(self) -> int:
        """How many ranks share every parameter."""
        return self.fsdp * self.cp

    @property
    def ranks(self) -> int:
        """How many ranks hold the model together."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """How many ranks hold a stage together, which is all of a model that is not cut in them."""
        return self.shards * self.tp

    def stage_of(self, device: int) -> int:
        """The place of a device along pp, which is the number of its first stage."""
        return self.devices.index(device) // self.stage_ranks % self.pp

    @property
    def runs(self) -> tuple[tuple[range, ...], ...]:
        """The runs of layers that each place along pp has; one layer a stage, if none are known."""
        return _runs(self.stages or (1,) * (self.pp * self.virtual), self.pp)

    @property
    def row_ranks(self) -> int:
        """How many ranks see the same rows: those that share each layer, the tokens, or stages."""
        return self.pp * self.cp * self.tp

    @property
    def row_groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group of ranks that see the same rows.

        A group of an engine in processes of its own is a replica.
        """
        alike, stage = self.cp * self.tp, self.stage_ranks
        firsts = (
            replica + first
            for replica in range(0, len(self.devices), self.ranks)
            for first in range(0, stage, alike)
        )
        return tuple(
            tuple(
                device
                for start in range(first, first + self.ranks, stage)
                for device in self.devices[start : start + alike]
            )
            for first in firsts
        )

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each process that computes with it; an engine has one for each replica."""
        return (
            self.row_groups
            if self.engine_plan.in_process
            else tuple((device,) for device in self.devices)
        )

    @property
    def owners(self) -> tuple[int, ...]:
        """The devices whose processes hold anything of it."""
        return tuple(device for rank, device in enumerate(self.devices) if self.owns(rank))

    def owns(self, rank: int) -> bool:
        """Whether the process of a rank's device holds anything; an engine's first of a replica."""
        first = rank % self.ranks < self.stage_ranks and rank % (self.cp * self.tp) == 0
        return first or not self.engine_plan.in_process

    @property
    def row_parts(self) -> int:
        """How many ranks, or groups of them that see the same rows, see different ones."""
        return len(self.devices) // self.row_ranks

    @property
    def replicas(self) -> int:
        """Copies of the whole model over the pool's devices."""
        return len(self.devices) // self.ranks

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
    def activations(self) -> str:
        """The name of the part that is the host memory of an update's activations."""
        return f"{self.name}/activations"

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
        return len(self.devices) > 1 and (self.trained or self.ranks > 1)

    def layout(self) -> str:
        """The printed layout."""
        parts = [f"pp={self.pp}"] if self.pp > 1 else []
        parts += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        parts += [f"schedule={self.schedule}"] if self.schedule != "1f1b" else []
        parts += [f"fsdp={self.fsdp}"] if self.fsdp > 1 else []
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        parts += [f"cp={self.cp}", *([self.cp_by] if self.cp_by else [])] if self.cp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += ["sequence"] if self.sequence else []
        parts += [f"x{self.replicas}"] if self.replicas > 1 else []
        parts = parts or ["whole"]
        parts += self.engine_plan.told()
        again = self.recomputes
        parts += ["recompute" if again is True else f"recompute={again}"] if again else []
        parts += ["reshard_after_forward=False"] if self.kept_whole else []
        parts += ["gradient_sync=last"] if self.reduces_last else []
        offloads = [self.offload, "activations" if self.hosts_activations else None]
        told = ",".join(each for each in offloads if each)
        parts += [f"offload={told}"] if told else []
        parts += ["compile"] if self.compiled else []
        everywhere = set(self.uses) <= set(self.tf32)
        told = "tf32" if everywhere else f"tf32={','.join(self.tf32)}"
        parts += [told] if self.tf32 else []
        parts += [f"micro={self.micro_tokens}"] if self.micro_tokens != MICRO_TOKENS else []
        parts += [f"rows={self.rows_at_once}"] if self.rows_at_once != MOST_ROWS else []
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """As plain data; keys for what is rare, such as engines or `ep`, only where it is."""
        found = asdict(self)
        rare = (
            "drafter",
            "draft_tokens",
            "inside",
            "kept_whole",
            "recompute_first",
            "stages",
            "seeing",
        )
        late = ("hosts_activations", "compiled", "sequence", "tf32", "reduces_last")
        for name in (*rare, *late):
            if not found[name]:
                del found[name]
        usual: dict[str, object] = dict.fromkeys(("ep", "cp", "pp", "virtual"), 1)
        usual |= {"rows_at_once": MOST_ROWS, "cp_by": None, "schedule": "1f1b"}
        for name in (name for name, value in usual.items() if found[name] == value):
            del found[name]
        del found["engine_plan"], found["options"]
        if self.engine_plan.own_process:
            found["options"] = self.engine_plan.settings.as_json()
        return found


def engines_of(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Those of some instances that are engines in processes of their own."""
    return tuple(each for each in instances if each.engine_plan.own_process)


def told_options(instance: Instance, **said: object) -> Instance:
    """An engine whose options say more."""
    return replace(instance, options=instance.engine_plan.settings.model_copy(update=said))
