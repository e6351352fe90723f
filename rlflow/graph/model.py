"""What a user says about a model: a name, where its weights are, how it is trained.

Nothing is loaded here: sizes are read from `config.json` and the headers of the
safetensors files by the scheduler, weights by the engines.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypedDict, Unpack

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from rlflow.errors import LONGEST_NAME, Source
from rlflow.graph.source import declared_at
from rlflow.graph.strict_model import Strict
from rlflow.graph.user.routers import Router

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class OptimizerOptions(Strict):
    """What every optimizer has: AdamW's options, and a learning rate with its schedule."""

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse a schedule without an end, and an end that nothing reads."""
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"schedule={self.schedule!r} needs total_steps=")
        if self.schedule == "constant" and self.total_steps:
            raise ValueError("total_steps does nothing with schedule='constant'")

    def describe(self) -> str:
        """The printed form: the learning rate, then what differs from the defaults."""
        rest = self.model_dump(exclude_defaults=True, exclude={"lr"})
        parts = [f"lr={self.lr:g}", *(f"{key}={value}" for key, value in sorted(rest.items()))]
        return f"{type(self).__name__.lower()}({', '.join(parts)})"


class AdamW(OptimizerOptions):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with a learning-rate schedule.

    `lr` is reached after `warmup_steps` optimizer steps and follows `schedule` down to
    `min_lr_ratio * lr` at `total_steps`; `constant` needs no total.

    Both `moments` of a parameter are kept in float32 (float64 for weights of such), or in bfloat16:
    half the memory, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.3). They are updated in
    float32 and rounded up or down by chance, by a hash that is the same in every repetition. In
    `int8` those of matrices of 4096 numbers or more are codes of 8 bits with a float32 scale for
    256 numbers (Dettmers et al. 2022, arXiv:2110.02861), those of others stay float32.
    """

    moments: Literal["float32", "bfloat16", "int8"] = "float32"

    @property
    def momentum(self) -> None:
        """None: every parameter has two moments."""
        return None

    @model_serializer(mode="wrap")
    def _without_wide_moments(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As data; without `moments` where they are as ever."""
        return {k: v for k, v in plain(self).items() if (k, v) != ("moments", "float32")}


class Muon(OptimizerOptions):
    """Muon (Jordan et al. 2024) for the matrices of layers, AdamW for everything else.

    A matrix moves along its Nesterov momentum with all singular values made about 1, by five steps
    of a Newton-Schulz iteration, times 0.2 * sqrt(max(rows, columns)): so much that an update is as
    large as AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2), and one `lr` serves both.
    Embeddings, heads, norms and biases have AdamW with `betas` and `eps`. `weight_decay` is of all
    matrices, the schedule as `AdamW` has it. States are float32 (float64 for weights of such).
    """

    momentum: float = Field(default=0.95, ge=0, lt=1)

    @property
    def moments(self) -> Literal["float32"]:
        """What states are kept in."""
        return "float32"


class Average(Strict):
    """An exponential moving average of another model's weights, in the place of training.

    `ops.average` sets w <- decay * w + (1 - decay) * theta after the updates that make theta
    (Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv 1703.01780, section 2).
    `decay=0` copies, `decay=1` never moves.
    """

    decay: float = Field(default=0.99, ge=0, le=1)

    def describe(self) -> str:
        """The printed form."""
        return f"average(decay={self.decay:g})"


class LoRA(Strict):
    """Low-rank adapters in the place of full training (Hu et al. 2021, section 4.1).

    Every linear layer of the language model whose name ends in one of `targets` computes
    W x + alpha / rank * B A x
    with `A [rank, in]` and `B [out, rank]`. Training changes A and B alone, and a new head.
    """

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16, gt=0)
    targets: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)

    @field_validator("targets", mode="before")
    @classmethod
    def _several_names(cls, targets: Any) -> Any:
        if isinstance(targets, str):
            raise ValueError(f"targets is a list of names: targets=({targets!r},)")
        return targets

    def describe(self) -> str:
        """The printed form."""
        return f"lora(rank={self.rank}, alpha={self.alpha:g}, targets={'+'.join(self.targets)})"


class ModelOptions(TypedDict, total=False):
    """What `rf.Model` takes beside a name and a path: its own fields, for type checkers."""

    head: Literal["lm", "value"]
    optimizer: AdamW | Muon | Average | None
    lora: LoRA | None
    router: Router | None
    freeze: str | tuple[str, ...]
    dtype: Literal["float32", "bfloat16", "float64"]
    init: Literal["pretrained", "random"]


class Model(Strict):
    """A model by name; given an optimizer it is trainable, or the average of one that is.

    `path` is a directory in Hugging Face form or the name of a hub model. `head` is
    `lm` for a causal language model, `value` for the same body with a scalar head.
    `init="random"` starts from fresh weights drawn from the run's seed. With `lora` the
    weights stay as they are and adapters are trained. `router` keeps the experts of a mixture in
    balance while it is trained. Training leaves the parts that `freeze` names as they are: of a
    model that sees, its `vision` tower, and the `projector` from there to the language model.
    """

    name: str
    path: str
    head: Literal["lm", "value"] = "lm"
    optimizer: AdamW | Muon | Average | None = None
    lora: LoRA | None = None
    router: Router | None = None
    freeze: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    init: Literal["pretrained", "random"] = "pretrained"
    _where: Source | None = PrivateAttr(default=None)

    def __init__(self, name: str, path: str, **options: Unpack[ModelOptions]) -> None:
        fields: dict[str, Any] = {"name": name, "path": path, **options}
        super().__init__(**fields)

    def model_post_init(self, context: object, /) -> None:
        """Refuse adapters that nothing trains; note where the model was declared."""
        if self.lora is not None and self.optimizer is None:
            raise ValueError("lora= says what is trained, so it needs optimizer=")
        if self.lora is not None and isinstance(self.optimizer, Muon):
            raise ValueError(
                "Muon makes whole matrices orthogonal, and lora= trains two factors of each: "
                "orthogonal factors say nothing of their product; optimizer=rf.AdamW(lr=...)"
            )
        if self.lora is not None and getattr(self.optimizer, "moments", None) == "int8":
            raise ValueError(
                "rows of adapters are too short for moments in blocks of 256, and all of them take "
                'little: leave out moments="int8"'
            )
        if self.router is not None and (self.optimizer is None or self.averaged):
            raise ValueError("router= says how routers are trained, so it needs optimizer=")
        if self.lora is not None and self.router is not None and self.router.bias_rate:
            raise ValueError("lora= trains adapters alone, and bias_rate= changes a weight beside")
        if self.freeze and self.optimizer is None:
            raise ValueError("freeze= says what is not trained, so it needs optimizer=")
        if self.freeze and self.lora is not None:
            raise ValueError("lora= trains adapters alone, so that freeze= has nothing to add")
        if self.averaged and self.dtype == "bfloat16":
            raise ValueError("an average moves by less than bfloat16 can tell: dtype='float32'")
        self._where = declared_at()

    @model_serializer(mode="wrap")
    def _without_absent_parts(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plain data; a model without adapters has no key for them, nor one in a graph's hash.

        Nor one without what is said of routers, or without frozen parts.
        """
        found: dict[str, Any] = dump(self)
        absent = [name for name in ("lora", "router", "freeze") if not getattr(self, name)]
        return {name: value for name, value in found.items() if name not in absent}

    @field_validator("freeze", mode="before")
    @classmethod
    def _parts_in_order(cls, freeze: Any) -> Any:
        """One part may be named alone; the order of several says nothing."""
        if isinstance(freeze, str):
            return (freeze,)
        if not isinstance(freeze, tuple | list) or not all(isinstance(p, str) for p in freeze):
            raise ValueError(
                'Input should be parts of a model that sees: "vision", "projector", or a tuple'
            )
        return tuple(sorted(set(freeze)))

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"a model's name is a plain word, got {name!r:.80}")
        if len(name) > LONGEST_NAME:
            raise ValueError(f"names of files begin with it: at most {LONGEST_NAME} letters")
        return name

    @property
    def averaged(self) -> bool:
        """Whether its weights are an average of another model's."""
        return isinstance(self.optimizer, Average)

    @property
    def trained_in_part(self) -> bool:
        """Whether training leaves some of its weights as they are."""
        return self.lora is not None or bool(self.freeze)

    @property
    def where(self) -> Source | None:
        """Where the model was declared."""
        return self._where

    def describe(self) -> str:
        """The printed form, without the name."""
        parts = [self.path]
        if self.head != "lm":
            parts.append(f"head={self.head}")
        if self.dtype != "float32":
            parts.append(f"dtype={self.dtype}")
        if self.init != "pretrained":
            parts.append(f"init={self.init}")
        if self.optimizer is not None:
            parts.append(self.optimizer.describe())
        if self.lora is not None:
            parts.append(self.lora.describe())
        if self.router is not None:
            parts.append(self.router.describe())
        if self.freeze:
            parts.append(f"freeze={'+'.join(self.freeze)}")
        return "  ".join(parts)
