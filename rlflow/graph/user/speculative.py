"""A frozen model that an engine drafts with, as a value: for drafters that nothing trains.

Nothing here knows what an engine does with it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlflow.errors import Finding, PlanError
from rlflow.graph.strict_model import Strict

Algorithm = Literal["EAGLE", "EAGLE3", "STANDALONE", "NEXTN", "NGRAM"]
# Those that draft with a model of files of its own: the others have none.
WITH_FILES = ("EAGLE", "EAGLE3", "STANDALONE")

Positive = Annotated[int, Field(ge=1)]


class Speculative(Strict):
    """Speculative decoding in an engine with a draft model that is not trained.

    `algorithm` is SGLang's name: heads on the policy's hidden states ("EAGLE", "EAGLE3", Li et al.
    2024 and 2025), a smaller language model ("STANDALONE"), layers of the policy itself ("NEXTN"),
    or n-grams of the rows so far ("NGRAM"). The first three need a `draft_model`: an absolute
    path or a hub name. It proposes `draft_tokens` a turn, at each place the `topk` likeliest.
    A drafter that is trained is given to the rollout instead: `ops.rollout(..., drafter=)`.
    """

    algorithm: Algorithm = "EAGLE"
    draft_model: str | None = None
    draft_tokens: Positive = 3
    topk: Positive = 1

    @model_validator(mode="after")
    def _has_its_model(self) -> Self:
        """A draft model where there is one, and the same from everywhere; PlanError E677.

        The same for a `topk` that would do nothing.
        """
        path, wanted = self.draft_model, self.algorithm in WITH_FILES
        if self.algorithm == "NGRAM" and self.topk != 1:
            raise PlanError(self._without_topk())
        if (bool(path) if wanted else path is None) and not _relative(path):
            return self
        what = "needs a draft_model" if wanted else "drafts with no model of its own"
        if wanted and path:
            what = "has another draft_model for every process"
        raise PlanError(
            Finding(
                code="E677",
                what=f"rf.Speculative(algorithm={self.algorithm!r}) {what}",
                got=f"draft_model={path!r}",
                expected="an absolute path or a hub name" if wanted else "no draft_model",
                fix=f'rf.Speculative(algorithm="{self.algorithm}"'
                + (', draft_model="/models/draft")' if wanted else ")"),
            )
        )

    def _without_topk(self) -> Finding:
        return Finding(
            code="E677",
            what='rf.Speculative(algorithm="NGRAM") drafts what its rows have repeated: '
            "topk would do nothing",
            got=f"topk={self.topk}",
            expected="no topk",
            fix=f'rf.Speculative(algorithm="NGRAM", draft_tokens={self.draft_tokens})',
        )

    @property
    def verified(self) -> int:
        """Tokens of a row that the policy reads a turn: what is drafted, and the one before it."""
        return 1 + self.draft_tokens * self.topk

    def arguments(self) -> dict[str, Any]:
        """SGLang's arguments for it."""
        if self.algorithm == "NGRAM":
            return {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": self.verified,
            }
        return drafting(self.algorithm, self.draft_model, self.draft_tokens, topk=self.topk)


def slots(verified: int) -> int:
    """Tokens that a row takes in an engine's pool beyond its own, of which it verifies so many.

    SGLang has slots for two turns.
    """
    return 2 * verified


def drafting(algorithm: str, path: str | None, tokens: int, *, topk: int = 1) -> dict[str, Any]:
    """SGLang's arguments for drafts of so many tokens, by the model of a path if one is given."""
    return {
        "speculative_algorithm": algorithm,
        **({} if path is None else {"speculative_draft_model_path": path}),
        "speculative_num_steps": tokens,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 1 + tokens * topk,
    }


def _relative(path: str | None) -> bool:
    """Whether a path depends on who reads it where: it begins with a dot or a tilde, or is longer.

    A hub name has one slash at the most.
    """
    if path is None or PurePath(path).is_absolute():
        return False
    return path.startswith((".", "~")) or path.count("/") > 1
