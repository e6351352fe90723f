"""A recipe filled in: the text of a pipeline file, and the file.

This file knows how templates are filled; what they say is theirs.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from rlflow.cli.recipes.catalogue import TEMPLATES, Recipe
from rlflow.cli.recipes.rows import OwnRows, double_quoted
from rlflow.data.paths import shown
from rlflow.errors import Finding, UsageError
from rlflow.modelfiles.configs import CONTEXT, read_config, text_value
from rlflow.modelfiles.directories import model_directory

LINE = 100
LONGEST = 512  # New tokens of a response, of models with contexts for more
RULE = 501  # of ruff, for lines of more
# Names of the written file, and modules that a file of the same name would stand before.
TAKEN = {"actor", "adam", "apart", "cfg", "Config", "correct", "critic", "in_turns", "last_number"}
TAKEN |= {"ops", "placements", "ref", "rf", "rows", "same_number", "student"}
TAKEN |= {"datasets", "numpy", "ray", "rlflow", "sglang", "torch", "transformers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPipeline:
    """What a pipeline is written from: a recipe, a model, rows, and rows that are held out."""

    recipe: Recipe
    path: Path
    model: str
    rows: OwnRows
    held_out: OwnRows | None = None

    def text(self) -> str:
        """The pipeline file. Raises OSError where a template cannot be read."""
        judged = self.held_out is not None or self.recipe.name != "sft"
        correct = (TEMPLATES / "correct.in").read_text().rstrip()
        values = {
            "file": self.path.name,
            "name": self.path.stem,
            "model": double_quoted(self.model),
            "data": double_quoted(self.rows.data),
            "chat": str(has_chat_template(self.model)),
            "longest": room_for_responses(self.model),
            "rows": self.rows.source(),
            "correct": correct if self.recipe.name != "sft" else f"{correct}\n\n\n" * judged,
            "imports": "\nfrom rlflow.data import last_number, same_number" * judged,
            "placements": (TEMPLATES / "placements.in").read_text().rstrip(),
            "eval_config": self._eval_config(),
            "evaluation": self._evaluation(),
        }
        filled = Template(self.recipe.template()).substitute(values)
        return "\n".join(map(long_line, filled.split("\n")))

    def _eval_config(self) -> str:
        if self.held_out is None:
            return ""
        fields = [f"eval_data: str = {double_quoted(self.held_out.data)}"]
        fields += ["eval_every: int = 20", "eval_limit: int = 256"]
        if self.recipe.name == "sft":
            fields.append(f"max_new_tokens: int = {room_for_responses(self.model)}")
        return "".join(f"\n    {field}" for field in fields)

    def _evaluation(self) -> str:
        if self.held_out is None:
            return ""
        split = "" if self.held_out.suffix else ', "test"'
        text = (TEMPLATES / "evaluation.in").read_text().rstrip()
        return "\n" + Template(text).substitute(trained=self.recipe.trained, split=split)


def long_line(line: str) -> str:
    """A line as it is, or one that a long path has made longer than linters take, marked so."""
    too_long = len(line) > LINE and line.startswith("    ") and ": str = " in line
    return f"{line}  # noqa: E{RULE}" if too_long else line


def room_for_responses(model: str) -> int:
    """New tokens of a response: of a model that is here at most half its context.

    A power of two; a prompt has the rest. Raises UsageError (E205) for a
    `config.json` that nothing can be made of.
    """
    directory = model_directory(model)
    context = 0 if directory is None else text_value(read_config(directory), *CONTEXT)
    if not context:
        return LONGEST
    return min(LONGEST, max(1, 1 << ((context // 2).bit_length() - 1)))


def has_chat_template(model: str) -> bool:
    """Whether prompts go through a chat template: of a model that is here, if it has one."""
    directory = model_directory(model)
    if directory is None:
        return True
    if any((directory / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def pipeline_file(name: str) -> Path:
    """The file for a pipeline of that name, or path. Raises UsageError E351 if it is no name."""
    path = Path(name).expanduser()
    path = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
    stem = path.stem
    usable = stem.isidentifier() and not keyword.iskeyword(stem) and not stem.startswith("_")
    if usable and stem not in TAKEN and stem not in sys.stdlib_module_names:
        return path
    mended = re.sub(r"\W+", "_", stem).strip("_")
    mended = mended if mended.isidentifier() and mended != stem else f"my_{mended or 'pipeline'}"
    raise UsageError(
        Finding(
            code="E351",
            what=f"a pipeline cannot be called {stem!r}",
            got="it is taken" if usable else "no name of a Python function",
            expected="letters, digits and _, and none that Python or the file itself uses",
            fix=f"rlflow init {shown(path.with_name(mended)) if path.parent.name else mended}",
        )
    )


def write_pipeline(asked: AskedPipeline, *, force: bool) -> None:
    """Write the file. Raises UsageError E350 where one is and `force` is not said, or no folder."""
    text = asked.text()
    try:
        with asked.path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        there = shown(asked.path)
        raise UsageError(
            Finding(
                code="E350",
                what=f"{there} is there already",
                expected="a name that is free, or --force, which overwrites it",
                fix=f"rlflow init {asked.path.with_suffix('')}_2 ...",
            )
        ) from None
    except OSError as error:
        what = f"{shown(asked.path)} cannot be written"
        raise UsageError(Finding(code="E350", what=what, got=error.strerror or "")) from None
