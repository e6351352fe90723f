"""The recipes: what each writes, in one line, and what it needs of the rows.

A recipe is a file of `templates/`. This file knows their names and nothing of what is in them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError, near_names

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe; `trained` is the model that it trains, as its template calls it."""

    name: str
    what: str
    needs: str
    placement: str
    trained: str = "actor"

    def as_json(self) -> dict[str, Any]:
        """Its plain data, for `--json`."""
        return asdict(self)

    def template(self) -> str:
        """The text that is filled in."""
        return (TEMPLATES / f"{self.name}.py.in").read_text()


PAID = "prompts, answers, a reward"

RECIPES = (
    Recipe(
        name="grpo",
        what="groups of samples, each compared with its group",
        needs=PAID,
        placement="sglang",
    ),
    Recipe(
        name="ppo",
        what="samples, each compared with what a critic expects",
        needs=f"{PAID}; memory for a critic",
        placement="sglang",
    ),
    Recipe(
        name="online_dpo",
        what="a prompt's best sample is preferred to its worst",
        needs=PAID,
        placement="sglang",
    ),
    Recipe(
        name="sft",
        what="supervised training on written answers",
        needs="prompts and answers",
        placement="colocate",
        trained="student",
    ),
)


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises UsageError E352 for one that is not there."""
    names = [recipe.name for recipe in RECIPES]
    if name not in names:
        near = near_names(name, names)
        raise UsageError(
            Finding(
                code="E352",
                what=f"there is no recipe {name!r}",
                expected=", ".join(names),
                near=near,
                fix=f"--recipe {near[0]}" if near else "rlflow recipes",
            )
        )
    return RECIPES[names.index(name)]
