"""What a rollout engine asks of a plan, as one value; the embedded engine asks for nothing.

Whether what generates is an engine in a process of its own, and whether it drafts, is asked here
and nowhere else: others ask this value, or the plan for its `engines`. Knows no sizes and no order.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.graph.user.engine_options import EMBEDDED, EngineOptions
from rlflow.graph.user.engines import VLLM, SGLang
from rlflow.graph.user.speculative import Speculative


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An engine: with `options` a process of its own for each replica, else the embedded one.

    In a process of its own the model `drafter` may propose `draft_tokens` tokens at a time. The
    drafter is an instance of its own `inside` that of the engine, and one process holds both.
    """

    options: EngineOptions | None = None
    drafter: str | None = None
    draft_tokens: int = 0
    inside: str | None = None

    @classmethod
    def chosen(cls, where: On) -> EnginePlan:
        """The engine that an assignment names."""
        return cls(options=where.options)

    @property
    def name(self) -> str:
        """What generates: `torch` where it is embedded."""
        return EMBEDDED if self.options is None else self.options.engine

    @property
    def own_process(self) -> bool:
        """Whether it is an engine in a process of its own."""
        return self.options is not None

    @property
    def lies_inside(self) -> bool:
        """Whether it is what drafts in an engine."""
        return self.inside is not None

    @property
    def in_process(self) -> bool:
        """Whether an engine's process holds it: it is the engine itself, or a drafter in one."""
        return self.own_process or self.lies_inside

    @property
    def settings(self) -> EngineOptions:
        """The options of an engine in a process of its own; the embedded one has none."""
        assert self.options is not None, "the embedded engine has no options"
        return self.options

    @property
    def title(self) -> str:
        """The engine's name as people write it."""
        return self.settings.title or self.name

    @property
    def suffix(self) -> str:
        """The suffix that tells its instance from others of the same model on the pool."""
        return f"/{self.name}" if self.own_process else ""

    @property
    def sglang(self) -> SGLang | None:
        """SGLang's options, which say how weights arrive; None for any other engine."""
        return self.options if isinstance(self.options, SGLang) else None

    @property
    def lendable(self) -> SGLang | VLLM | None:
        """The options of an engine that can open memory of its devices; None for any other."""
        return self.options if isinstance(self.options, SGLang | VLLM) else None

    @property
    def in_float8(self) -> bool:
        """Whether it holds linear layers in 8-bit floats, with a scale for each block."""
        return self.sglang is not None and self.sglang.quantization == "fp8"

    @property
    def speculative(self) -> Speculative | None:
        """What its options alone draft with: a model that is never updated, or no model."""
        said: Speculative | None = getattr(self.options, "speculative", None)
        return said

    @property
    def drafts_by_options(self) -> bool:
        """Whether it drafts with what its options name."""
        return self.speculative is not None

    @property
    def has_drafter(self) -> bool:
        """Whether a model of the graph drafts in it."""
        return self.drafter is not None

    @property
    def drafts(self) -> bool:
        """Whether it drafts: with a drafter that lies in it, or by its options."""
        return self.has_drafter or self.drafts_by_options

    @property
    def verified(self) -> int:
        """How many drafted tokens of each row it verifies in one pass."""
        said = self.speculative
        return self.draft_tokens if said is None else said.verified - 1

    @property
    def beams(self) -> int:
        """For how many tokens of a row the draft model of its options computes logits at once."""
        said = self.speculative
        return 0 if said is None or said.algorithm == "NGRAM" else said.topk

    @property
    def saves_memory(self) -> bool:
        """Whether it is an engine that can give its memory back."""
        return self.options is not None and bool(self.options.memory_saver)

    @property
    def share_decides(self) -> bool:
        """Whether a share of the memory is all that says how many tokens its pool holds."""
        said = self.options
        return bool(said and said.mem_fraction_static is not None and said.max_total_tokens is None)

    def drafter_of(self, node: Node) -> str | None:
        """The model that drafts for a node's rows; an engine has one for all its rollouts."""
        return self.drafter if self.own_process else node.drafter

    def told(self) -> tuple[str, ...]:
        """Its words in a printed layout."""
        found: tuple[str, ...] = (self.name,) if self.own_process else ()
        found += (f"drafts={self.draft_tokens}",) if self.has_drafter else ()
        return found + ((f"in {self.inside}",) if self.lies_inside else ())
