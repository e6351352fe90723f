"""Placements: which use of which model runs where, as a value.

A pool is a named set of devices, an assignment ties a use to a pool and a layout.
Nothing here knows how many devices there really are.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from rlflow.errors import Finding, GraphError, PlanError, known_names, near_names
from rlflow.graph.rules.nesting import OF_TRIP
from rlflow.graph.strict_model import Strict
from rlflow.graph.user.engine_options import EngineOptions, engine_named, options_of
from rlflow.graph.user.shares import (
    devices_by_share,
    nearest_counts,
    never_whole,
    part_of,
    part_or_none,
)

Offload = Literal["layers", "optimizer", "activations"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
# How ranks with parts of the same rows attend: each to all tokens with some heads, or round a ring.
ContextBy = Literal["ulysses", "ring"]
# When ranks of a pipeline do what: one forward, one backward; or that in two halves, ZB-H1.
Schedule = Literal["1f1b", "zero-bubble"]
Count = Annotated[int, Field(ge=1)]
# Updates that rollouts may be behind: each one more is a batch that waits in memory.
MOST_STALE = 1000
# False for none, True for all layers, or how many of the first.
Recompute = bool | Literal["selective"] | Count


class On(Strict):
    """Where a use of a model runs: a pool, and the layout of the model over its devices.

    `fsdp` ranks share every parameter, `tp` ranks share every layer. Devices that `fsdp` x `tp`
    leaves over hold replicas of that layout (hybrid sharding where `fsdp` > 1). With `ep` the
    experts of a mixture lie apart: of the `fsdp` ranks each `ep` neighbours hold all of a layer's,
    each as many, and tokens go to the ranks of the experts that they chose and come back. All else,
    and what is left of `fsdp`, is shared as without. With `cp` updates and log-probs cut the tokens
    of every row over `cp` ranks, between which attention is exchanged (context parallelism); these
    share every parameter with those along `fsdp`, so that fsdp x cp x tp devices hold the model.
    With `cp_by="ulysses"` every rank attends with a part of the heads to all tokens (Jacobs et al.
    2023), with `"ring"` keys and values go round the ranks (Liu et al. 2023); a plan says which
    where it is left out.
    With `pp` layers are cut into so many stages, one behind the other: ranks hold the layers of
    their stage alone, and micro-batches pass from stage to stage (Narayanan et al. 2021), so that
    pp times as many devices hold the model. With `virtual` each of these ranks has so many stages,
    apart from each other (section 2.2 there), so that they wait for each other that much less,
    and send as often more. With `schedule="zero-bubble"` a stage's backward sends on the gradient
    of its input first, and makes those of its weights later, where it would wait (ZB-H1 of Qi et
    al. 2023); with `"1f1b"` it makes both at once. Rollouts generate whole rows through all layers,
    in a layout without any of these. `weights="own"`
    gives a rollout a copy of the weights where it could share the trained ones. With
    `recompute=True` only the inputs of each layer are kept for the backward pass, which computes
    the rest again (Chen et al. 2016); with a number n that holds of the first n layers alone, and
    with `"selective"` what the attention of each layer makes is kept beside its input. With
    `reshard_after_forward=False` layers that `fsdp` ranks share stay whole from an update's forward
    to its backward (stage 2 of ZeRO for weights, stage 3 for the rest). With `sequence=True` `tp`
    ranks share the tokens of norms and residuals, between the blocks of which each has a part
    (Korthikanti et al. 2022, section 4.2.2); for updates and log-probs.
    With `gradient_sync="last"` gradients are whole on each rank until the last micro-batch of a
    step sums them over `fsdp`; with `"each"` every one does, to shares (stage 2 of ZeRO).
    With `micro` updates, log-probs and values go over their rows in micro-batches of so many tokens
    a rank at the most, which a plan halves until they fit.
    `offload="layers"` keeps a frozen model on the host and copies it in layer by layer;
    `offload="optimizer"` keeps the moments of a trained one there, and master weights beside lower
    ones, and brings them piece by piece while a step uses them. A plan does so by itself where an
    update does not fit otherwise. `offload="activations"` keeps there what the layers of an update
    save for its backward, or with `recompute` their inputs. Several are a list of them.
    With `compile=True` torch compiles the layers of updates and log-probs. With `tf32=True` matrix
    products of a float32 model take 10 bits of its factors' fractions on NVIDIA's GPUs, and add up
    in float32, for the uses that say so.

    Of a rollout devices of pool `also` draw some prompts, while nothing trains on them: a share of
    them, or a number, or as many as end together with the others. It may be another `rf.on`; a
    name alone has the same engine.

    `engine` generates for a rollout. `torch` is embedded in the worker. `sglang`, `vllm` and
    registered engines run in a process of their own for each replica; their options are a value,
    `rf.SGLang(...)`.
    """

    pool: str
    fsdp: Count | None = None
    tp: Count | None = None
    ep: Count | None = None
    cp: Count | None = None
    cp_by: ContextBy | None = None
    pp: Count | None = None
    virtual: Count | None = None
    schedule: Schedule | None = None
    engine: str | EngineOptions | None = None
    weights: Literal["shared", "own"] | None = None
    recompute: Recompute | None = None
    reshard_after_forward: bool | None = None
    sequence: bool | None = None
    gradient_sync: Literal["each", "last"] | None = None
    micro: Count | None = None
    offload: Offload | tuple[Offload, ...] | None = None
    compile: bool | None = None
    tf32: bool | None = None
    also: On | None = None
    share: Count | str | None = None

    @field_validator("also", mode="before")
    @classmethod
    def _with_engine(cls, also: object, known: ValidationInfo) -> object:
        """A pool by its name alone has the engine of the pool beside it."""
        if also is not None and not isinstance(also, str | dict | On):
            raise ValueError('Input should be another pool: also="gen", or also=rf.on("gen", tp=2)')
        engine = known.data.get("engine")
        return {"pool": also, "engine": engine} if isinstance(also, str) else also

    @field_validator("share", mode="before")
    @classmethod
    def _known_share(cls, said: object) -> object:
        """A number of prompts, or a part of them."""
        if isinstance(said, str):
            if (part_or_none(said) or 1) >= 1:
                raise ValueError(f'share={said!r} is no part of the prompts, such as "1/4"')
        elif said is not None and (not isinstance(said, int) or said < 1):
            raise ValueError('Input should be a part of the prompts, "1/4", or how many, from 1 on')
        return said

    @model_validator(mode="after")
    def _shared_out(self) -> On:
        if self.share is not None and self.also is None:
            raise ValueError(f"share={self.share!r} without also=, the pool that has that share")
        if self.also is not None and self.also.pool == self.pool:
            raise ValueError(f"also={self.pool!r} is the pool that has the rest: name another one")
        if self.also is not None and self.also.also is not None:
            raise ValueError(
                f"also= names one pool, and that of {self.also.pool!r} names "
                f"{self.also.also.pool!r} with an also= of its own: leave that out"
            )
        return self

    @field_validator("offload", mode="before")
    @classmethod
    def _each_offload_once(cls, offload: object) -> object:
        """One alone as itself, several in one order, so that equal placements are equal."""
        if not isinstance(offload, list | tuple) or not set(offload) <= set(OFFLOADS):
            return offload
        found = tuple(each for each in OFFLOADS if each in offload)
        return found if len(found) > 1 else found[0] if found else None

    @field_validator("engine", mode="before")
    @classmethod
    def _known_engine(cls, engine: object) -> object:
        return engine_named(engine)

    @field_validator("recompute", mode="before")
    @classmethod
    def _known_recompute(cls, said: object) -> object:
        count = isinstance(said, int) and (isinstance(said, bool) or said >= 1)
        if count or said in (None, "selective"):
            return said
        raise ValueError("Input should be True, False, 'selective', or how many layers, the first")

    @field_serializer("engine")
    def _engine_as_json(self, engine: str | EngineOptions | None) -> str | dict[str, Any] | None:
        return engine.as_json() if isinstance(engine, EngineOptions) else engine

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """All that stays in host memory."""
        found = self.offload
        return found if isinstance(found, tuple) else () if found is None else (found,)

    @property
    def options(self) -> EngineOptions | None:
        """The options of an engine in a process of its own; None for the embedded one."""
        return options_of(self.engine)

    def describe(self) -> str:
        """The printed form: the pool, then what was said."""
        options = self.model_dump(exclude_none=True, exclude={"pool"})
        if isinstance(self.engine, EngineOptions):
            options["engine"] = self.engine.describe()
        if self.offloads:
            options["offload"] = ",".join(self.offloads)
        if self.also is not None:
            options["also"] = self.also.describe()
        return " ".join([self.pool, *(f"{key}={value}" for key, value in options.items())])


def on(pool: str, **layout: object) -> On:
    """A pool, and a layout for a use of a model there: `rf.on("gen", tp=2)`.

    Options are those of `rf.On`. What is left out is derived, and the plan prints it.
    """
    return On.model_validate({"pool": pool, **layout})


class Placement(Strict):
    """Pools of devices, and which use of which model runs on which pool.

    A pool is a number of devices of its own, or a list of device numbers; lists may overlap. Or it
    is a share of all devices there are, `"3/4"`, or `"*"`, those that no other pool takes: such a
    placement is for any number of devices of which its shares are whole numbers.
    Of several assignments the most specific wins: a node's name, `model.use`, the model, `*`.

    With `staleness` k a rollout reads weights that are up to k updates old, and so runs ahead of
    the updates. `stream` cuts chains of row ops across pools into chunks: a number of them, or
    `auto` for as many as shorten the estimated iteration.

    The weights of an engine are updated between two rollouts. With `pause_at` t they are updated
    within one: every rollout pauses after t tokens of a response, takes weights that are one
    update newer, prefills what it has so far, and goes on.

    With `continuous` an engine never drains: prompts begin as rows end, and an iteration gets the
    groups that are complete first, of which no token is more than `staleness` updates old. Rows
    live through as many updates as that allows, and read what they have so far anew after each.
    """

    pools: dict[str, Count | str | list[int]] = Field(min_length=1)
    assign: dict[str, On]
    staleness: int = Field(default=0, ge=0, le=MOST_STALE)
    stream: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    pause_at: Count | None = None
    continuous: bool = False

    @field_validator("pools", mode="before")
    @classmethod
    def _known_pools(cls, said: object) -> object:
        """What is no pool has one message, not one for each kind of pool."""
        for name, each in said.items() if isinstance(said, dict) else ():
            if not isinstance(each, str | list | tuple) and (not isinstance(each, int) or each < 1):
                what = f"pool {name!r} should be a number of devices, from 1 on, a list of them"
                raise ValueError(f'{what}, or a share such as "3/4" or "*"')
        return said

    @field_validator("stream", mode="before")
    @classmethod
    def _known_stream(cls, said: object) -> object:
        if said == "auto" or (isinstance(said, int) and said >= 1):
            return said
        raise ValueError("Input should be 'auto', or how many chunks, from 1 on")

    @model_validator(mode="after")
    def _pools_exist(self) -> Placement:
        for key, where in self.assign.items():
            for each in (where, where.also):
                if each is not None and each.pool not in self.pools:
                    raise GraphError(_no_pool(key, where, each.pool, list(self.pools)))
        for name, devices in self.pools.items():
            if OF_TRIP in name:
                why = f"a name without {OF_TRIP!r}, by which trips are numbered"
                raise ValueError(f"pool {name!r}: {why}")
            if isinstance(devices, str):
                _check_share(name, devices)
            if isinstance(devices, list) and (not devices or len(set(devices)) != len(devices)):
                raise ValueError(f"pool {name!r} needs a list of distinct devices, got {devices}")
            if isinstance(devices, list) and min(devices) < 0:
                raise ValueError(f"pool {name!r}: device numbers start at 0, got {devices}")
        if why := never_whole(self._wanted(), len(self._listed())):
            raise ValueError(f"pools {self.pools}: {why}")
        return self

    def _wanted(self) -> dict[str, int | str]:
        """Pools that take free devices: how many, or their share."""
        return {name: each for name, each in self.pools.items() if not isinstance(each, list)}

    def _listed(self) -> set[int]:
        """Devices that lists name."""
        return {d for listed in self.pools.values() if isinstance(listed, list) for d in listed}

    @property
    def shares(self) -> bool:
        """Whether a pool is a share, so that its devices depend on how many there are."""
        return any(isinstance(each, str) for each in self.pools.values())

    def at(self, count: int, name: str = "placement", kind: str = "KIND") -> Placement:
        """The placement on so many devices: shares as numbers, the rest as it is.

        Raises PlanError E255, with the nearest counts that work, where a share is no whole number
        of them; it calls the placement `name` and the devices `kind`.
        """
        if not self.shares:
            return self
        found = devices_by_share(self._wanted(), len(self._listed()), count)
        if found is None:
            raise PlanError(self._not_whole(name, count, kind))
        return self.model_copy(update={"pools": {**self.pools, **found}})

    def most_of(self, there: int) -> int:
        """The largest number of devices, of those there are, that the shares divide."""
        wanted, listed = self._wanted(), len(self._listed())
        return nearest_counts(wanted, listed, there + 1)[0] or self.num_devices()

    def _not_whole(self, name: str, count: int, kind: str) -> Finding:
        below, above = nearest_counts(self._wanted(), len(self._listed()), count)
        got = []
        for pool, said in self._wanted().items():
            if isinstance(said, int):
                got.append(f"{pool}: {said}")
                continue
            part = part_of(said)
            each = "what the others leave" if part is None else f"{part * count}"
            got.append(f"{pool}: {said} of {count} is {each}")
        counts = [str(each) for each in (below, above) if each]
        return Finding(
            code="E255",
            what=f"placement {name!r} does not divide {count} devices by its shares",
            got="\n".join(got),
            expected=f"a whole number of devices in each pool: of {' or '.join(counts)}",
            fix=f"--devices {kind}:{above if below is None else below}",
        )

    def devices(self) -> dict[str, tuple[int, ...]]:
        """Device numbers of every pool: lists as written, counts the lowest numbers still free.

        Shares are those of the fewest devices that they divide; `at` says another number.
        """
        if self.shares:
            least = nearest_counts(self._wanted(), len(self._listed()), 0)[1]
            return self.at(least).devices()
        taken = self._listed()
        result = {}
        following = 0
        for name, wanted in self.pools.items():
            if isinstance(wanted, list):
                result[name] = tuple(wanted)
                continue
            numbers: list[int] = []
            while len(numbers) < int(wanted):
                if following not in taken:
                    numbers.append(following)
                following += 1
            result[name] = tuple(numbers)
        return result

    def num_devices(self) -> int:
        """How many devices a cluster needs to have."""
        return max(max(devices) for devices in self.devices().values()) + 1


def in_shares(placement: Placement, count: int) -> Placement:
    """The placement in shares of `count` devices, for any multiple of them; itself if it has none.

    It has where pools are numbers of devices that add up to all of them: `{"train": 6, "gen": 2}`
    of 8 is `{"train": "3/4", "gen": "1/4"}`.
    """
    numbers = {name: n for name, n in placement.pools.items() if isinstance(n, int)}
    if len(numbers) < len(placement.pools) or sum(numbers.values()) != count:
        return placement
    pools = {name: "*" if n == count else str(Fraction(n, count)) for name, n in numbers.items()}
    return placement.model_copy(update={"pools": pools})


def _check_share(name: str, said: str) -> None:
    try:
        part_of(said)
    except ValueError:
        how = f'"*" for all, "3/4", or a number of devices: {said}' if said.isdigit() else ""
        raise ValueError(
            f"pool {name!r}: {said!r} is no share of the devices: "
            + (how or '"*" for what the others leave, or a part of all such as "3/4"')
        ) from None


def _no_pool(key: str, where: On, pool: str, pools: list[str]) -> Finding:
    # The line is found by what is imported late: it knows graphs, which know placements.
    from rlflow.graph.source import declared_at

    near = near_names(pool, pools)
    first = (near or pools)[0]
    said = f'"{first}"' if where.pool == pool else f'"{where.pool}", also="{first}"'
    return Finding(
        code="E134",
        what=f"assign[{key!r}] names pool {pool!r}, which the placement does not have",
        where=declared_at(),
        expected=known_names(pools),
        near=near,
        fix=f'"{key}": rf.on({said})',
    )
