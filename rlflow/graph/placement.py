"""Placements: which use of which model runs where, as a value.

A pool is a named set of devices, an assignment ties a use to a pool and a layout.
Nothing here knows how many devices there really are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from rlflow.graph.engine_options import EngineOptions, engine_named, options_of

Count = Annotated[int, Field(ge=1)]


class On(BaseModel):
    """A pool and a layout: `fsdp` ranks sharing the parameters, `tp` ranks sharing each layer.

    Devices left over by `fsdp` x `tp` hold replicas of that layout (hybrid sharding where
    `fsdp` > 1). `weights="own"` gives a rollout its own copy where it could share the trained
    one. `recompute` keeps only the inputs of each layer for the backward pass (Chen et al.
    2016); `offload="layers"` keeps a frozen model on the host and brings it in layer by layer.
    `engine` is what a rollout generates with: `torch`, embedded, or `sglang`, `vllm` or another
    registered one, a process of its own for each replica, with its options (`rf.SGLang`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str
    fsdp: Count | None = None
    tp: Count | None = None
    engine: str | EngineOptions | None = None
    weights: Literal["shared", "own"] | None = None
    recompute: bool | None = None
    offload: Literal["layers"] | None = None

    @field_validator("engine", mode="before")
    @classmethod
    def _known_engine(cls, engine: object) -> object:
        return engine_named(engine)

    @field_serializer("engine")
    def _engine_as_json(self, engine: str | EngineOptions | None) -> str | dict[str, Any] | None:
        return engine.as_json() if isinstance(engine, EngineOptions) else engine

    @property
    def options(self) -> EngineOptions | None:
        """The options of an engine in a process of its own; None for the embedded one."""
        return options_of(self.engine)

    def describe(self) -> str:
        """The printed form: the pool, then what was said."""
        options = self.model_dump(exclude_none=True, exclude={"pool"})
        if isinstance(self.engine, EngineOptions):
            options["engine"] = self.engine.describe()
        return " ".join([self.pool, *(f"{key}={value}" for key, value in options.items())])


def on(pool: str, **layout: object) -> On:
    """Assign a use to a pool, with a layout; what is left out is derived and shown."""
    return On.model_validate({"pool": pool, **layout})


class Placement(BaseModel):
    """Pools of devices and the assignment of uses to them.

    A pool is a number of devices of its own, or a list of device numbers, which may
    overlap with another pool's. The most specific assignment wins: a node's name,
    `model.use`, the model, `*`. With `staleness` k a rollout reads weights that are up to k
    updates old, and so runs ahead. `stream` cuts chains of row ops across pools into so many
    chunks, or into as many as shorten the estimated iteration (`auto`).

    The weights of an engine are updated between two rollouts, or with `pause_at` within one:
    every rollout pauses after so many tokens of a response, takes weights that are one update
    newer, and goes on; what it has seen is read again with the new weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: dict[str, Count | list[int]] = Field(min_length=1)
    assign: dict[str, On]
    staleness: int = Field(default=0, ge=0)
    stream: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    pause_at: Count | None = None

    @model_validator(mode="after")
    def _pools_exist(self) -> Placement:
        for key, where in self.assign.items():
            if where.pool not in self.pools:
                known = ", ".join(self.pools)
                raise ValueError(f"assign[{key!r}] names pool {where.pool!r}; there are: {known}")
        for name, devices in self.pools.items():
            if "#" in name:
                raise ValueError(f"pool {name!r}: a name without '#', by which trips are numbered")
            if isinstance(devices, list) and (not devices or len(set(devices)) != len(devices)):
                raise ValueError(f"pool {name!r} needs a list of distinct devices, got {devices}")
            if isinstance(devices, list) and min(devices) < 0:
                raise ValueError(f"pool {name!r}: device numbers start at 0, got {devices}")
        return self

    def devices(self) -> dict[str, tuple[int, ...]]:
        """Device numbers of every pool: lists as written, counts the lowest numbers still free."""
        taken = {d for listed in self.pools.values() if isinstance(listed, list) for d in listed}
        result = {}
        following = 0
        for name, wanted in self.pools.items():
            if isinstance(wanted, list):
                result[name] = tuple(wanted)
                continue
            numbers: list[int] = []
            while len(numbers) < wanted:
                if following not in taken:
                    numbers.append(following)
                following += 1
            result[name] = tuple(numbers)
        return result

    def num_devices(self) -> int:
        """How many devices a cluster needs to have."""
        return max(max(devices) for devices in self.devices().values()) + 1
